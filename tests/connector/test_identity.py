"""Scenarios 15 and 16: handshakes by child and rank, engine ids, inheritance."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.fake_children import FakeHandshake
from tests.support.fake_config import child
from tests.support.fake_worker import Bench

pytestmark = pytest.mark.vllm


# -- scenario 15 ----------------------------------------------------------------------------------------------


def test_each_child_gets_its_own_handshake_of_every_rank(ranks: int, hosted: bool) -> None:
    own_id = {"fields": {"engine_id": "b"}}
    with Bench(
        [child("A", hosted, handshake=True), child("B", hosted, handshake=True, **own_id), child("C", hosted)],
        ranks=ranks,
    ) as bench:
        assert bench.child("A").handshakes == {rank: FakeHandshake("A", rank, "e") for rank in range(ranks)}
        assert bench.child("B").handshakes == {rank: FakeHandshake("B", rank, "b") for rank in range(ranks)}
        assert bench.child("C").handshakes == {}


def test_without_handshakes_there_is_none(hosted: bool) -> None:
    with Bench([child("A", hosted)]) as bench:
        assert bench.workers[0].get_handshake_metadata() is None


def test_a_child_that_comes_back_has_a_new_engine_id(ranks: int) -> None:
    """Peers cache what they know by engine id. All ranks of a child live and die together."""
    with Bench([child("A", handshake=True), child("B", handshake=True)], ranks=ranks) as bench:
        bench.add(50)
        bench.step(2)
        bench.host("A", ranks - 1).die()
        renewed = {rank: FakeHandshake("A", rank, "e.1") for rank in range(ranks)}
        bench.until(lambda: bench.child("A").handshakes == renewed, "the new handshakes")
        bench.until(lambda: bench.half.children[0].up, "A to come back")
        bench.add(50, seed=1)
        bench.run()
        assert bench.child("B").handshakes == {rank: FakeHandshake("B", rank, "e") for rank in range(ranks)}


# -- scenario 16 ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("role", ["kv_both", "kv_producer", "kv_consumer"])
def test_role_and_policy_are_inherited(role: str, policy: str, hosted: bool) -> None:
    plain = child("A", hosted)
    del plain["kv_role"]
    own: dict[str, Any] = {"kv_role": "kv_both", "engine_id": "own", "kv_load_failure_policy": "recompute"}
    with Bench(
        [plain, child("B", hosted, fields=own)], transfer={"kv_role": role, "kv_load_failure_policy": policy}
    ) as bench:
        for config in bench.child("A").configs:
            assert (config.kv_role, config.kv_load_failure_policy, config.engine_id) == (role, policy, "e")
        for config in bench.child("B").configs:
            assert (config.kv_role, config.kv_load_failure_policy, config.engine_id) == ("kv_both", "recompute", "own")
        assert len(bench.child("A").configs) == 2  # one for each half
        bench.add(50)
        bench.run()


def test_a_child_knows_nothing_of_raykv(hosted: bool) -> None:
    with Bench([child("A", hosted, raykv={"timeout_s": 3})]) as bench:
        for config in bench.child("A").configs:
            assert set(config.kv_connector_extra_config) == {"fake", "script"}


def test_vllms_own_name_needs_roles() -> None:
    """Under the name MultiConnector vLLM reads the children's config first, and says so itself."""
    entry = child("A")
    with Bench([entry], connector="MultiConnector") as bench:
        bench.add(50)
        bench.run()
    del entry["kv_role"]
    with pytest.raises(ValueError, match="kv_role"), Bench([entry], connector="MultiConnector"):
        pass
