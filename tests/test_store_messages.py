"""What crosses in another form than it has."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from raykv.store_messages import LookedUp, Medium
from raykv.types import LeaseId, RequestId, StoreLife

HOST, DISK = Medium.HOST, Medium.DISK


@pytest.mark.parametrize(
    "media", [(), (HOST,) * 1000, (HOST,), (HOST, HOST, DISK, HOST), (DISK,) * 500 + (HOST,) * 500]
)
def test_an_answer_arrives_as_it_was_and_is_small(media: tuple[Medium, ...]) -> None:
    answer = LookedUp(StoreLife("a life"), RequestId("r"), len(media), LeaseId(7) if media else None, media)
    more = replace(answer, more=True, peer="b2b2")
    assert pickle.loads(pickle.dumps(more, protocol=5)) == more
    sent = pickle.dumps(answer, protocol=5)
    arrived = pickle.loads(sent)
    assert arrived == answer and all(type(one) is Medium for one in arrived.media)
    assert len(sent) < 300
