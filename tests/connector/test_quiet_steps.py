"""What costs nothing in a step in which nothing is asked of a child, and that it is not skipped when something is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector, ExampleConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_mp_connector import LMCacheMPConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata
from vllm.v1.outputs import KVConnectorOutput

from raykv.connector import vllm_compat
from raykv.connector.transfer_params import ChildParams
from raykv.connector.vllm_compat.connectors import IDLE_WHEN_EMPTY
from raykv.types import RequestId
from tests.support.fake_config import child
from tests.support.fake_worker import Bench

pytestmark = pytest.mark.vllm

METADATA = {
    "ExampleConnector": ExampleConnectorMetadata,
    "LMCacheMPConnector": LMCacheMPConnectorMetadata,
    "NixlConnector": NixlConnectorMetadata,
    "NixlPullConnector": NixlConnectorMetadata,
}


def asks_nothing(connector: str, meta: Any) -> bool:
    return IDLE_WHEN_EMPTY[connector].asks_nothing(meta, vllm_compat.said_by_default(meta))


@pytest.mark.parametrize("connector", IDLE_WHEN_EMPTY)
def test_metadata_that_is_the_default_one_asks_nothing(connector: str) -> None:
    assert asks_nothing(connector, METADATA[connector]())


@pytest.mark.parametrize("connector", IDLE_WHEN_EMPTY)
def test_whatever_else_it_says_is_asked(connector: str) -> None:
    for name, value in vars(METADATA[connector]()).items():
        if name in IDLE_WHEN_EMPTY[connector].beside:
            continue
        meta = METADATA[connector]()
        setattr(
            meta,
            name,
            not value
            if isinstance(value, bool)
            else type(value)(["r"])
            if isinstance(value, (list, set))
            else {"r": 1.0},
        )
        assert not asks_nothing(connector, meta), name


def test_what_a_later_version_adds_is_asked() -> None:
    meta: Any = ExampleConnectorMetadata()
    meta.more = ()
    assert not IDLE_WHEN_EMPTY["ExampleConnector"].asks_nothing(meta, vars(ExampleConnectorMetadata()))


def test_nixls_clock_alone_asks_nothing_but_gives_a_turn_now_and_then() -> None:
    meta = NixlConnectorMetadata()
    meta.scheduler_clock = 12.5
    assert asks_nothing("NixlConnector", meta)
    assert 0 < IDLE_WHEN_EMPTY["NixlConnector"].turn_every_s < 0.1


def test_hooks_that_are_the_base_classs_are_known() -> None:
    class Child(ExampleConnector):
        def take_events(self) -> Any:
            return ()

    plain, more = object.__new__(ExampleConnector), object.__new__(Child)
    assert vllm_compat.own_hooks(plain) == frozenset()
    assert vllm_compat.own_hooks(more) == {"take_events"}
    assert vllm_compat.own_hooks(None) == frozenset()


def test_the_base_class_does_nothing_in_those_hooks() -> None:
    plain = object.__new__(ExampleConnector)
    output = KVConnectorOutput()
    for name in vllm_compat.EMPTY_HOOKS:
        args = (output,) if name == "update_connector_output" else ()
        assert not getattr(KVConnectorBase_V1, name)(plain, *args), name
    assert output == KVConnectorOutput()


@pytest.mark.parametrize("many", [False, True])
def test_a_childs_parameters_are_put_back_also_when_it_raises(many: bool) -> None:
    params = ChildParams(["x", "y"])
    request = SimpleNamespace(request_id=RequestId("r"), kv_transfer_params={"a": 1})
    theirs = request.kv_transfer_params
    params.add(request)
    with pytest.raises(ZeroDivisionError), params.of_all(1) if many else params.of(1, request):
        assert request.kv_transfer_params == {"a": 1} and request.kv_transfer_params is not theirs
        request.kv_transfer_params["a"] = 2
        raise ZeroDivisionError
    assert request.kv_transfer_params is theirs and theirs == {"a": 1}
    with params.of_all(1):
        assert request.kv_transfer_params == {"a": 2}
    with params.of_all(0):
        assert request.kv_transfer_params == {"a": 1}


def test_a_save_is_counted_and_its_blocks_are_free_although_the_last_steps_report_nothing(hosted: bool) -> None:
    """Reports of a step come later; what then waits for nobody is given back in a step without a report."""
    with Bench([child("A", hosted, saves=True), child("B", hosted)]) as bench:
        bench.add(40, max_tokens=40)
        bench.run()
        assert bench.used_blocks == 0
        assert not bench.half._reports.pending and not bench.half._pins.any_closing
