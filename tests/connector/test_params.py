"""Scenario 12: each child sees the request's own transfer parameters, and what they return is merged."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from raykv.errors import ConfigError
from tests.support.fake_config import child
from tests.support.fake_worker import Bench

pytestmark = pytest.mark.vllm

ORDERS = list(itertools.permutations(["A", "B"]))


@pytest.mark.parametrize("order", ORDERS, ids="".join)
def test_different_keys_are_merged(order: tuple[str, ...], hosted: bool, overlap: bool) -> None:
    returned = {"A": {"x": 1}, "B": {"y": 2}}
    with Bench([child(n, hosted, returns=returned[n]) for n in order], async_scheduling=overlap) as bench:
        bench.add(20)
        bench.run()
        assert bench.results["r0"].params == {"x": 1, "y": 2}


@pytest.mark.parametrize(
    ("first", "second", "merged"),
    [
        (None, None, None),
        ({}, None, {}),
        (None, {"y": 2}, {"y": 2}),
        ({"x": 1}, {"x": 1}, {"x": 1}),
        ({"x": 1}, {"x": 2, "y": 3}, {"x": 1, "y": 3, "raykv": {"B": {"x": 2, "y": 3}}}),
    ],
)
def test_a_clash_keeps_both_apart(first: Any, second: Any, merged: Any) -> None:
    with Bench([child("A", returns=first), child("B", returns=second)]) as bench:
        bench.add(20)
        bench.run()
        assert bench.results["r0"].params == merged


def test_what_clashed_comes_back_to_its_child() -> None:
    """The other engine passes the parameters on; there each child finds its own again."""
    params = {"remote_engine_id": "a", "shared": 0, "raykv": {"B": {"remote_engine_id": "b"}}}
    with Bench([child("A"), child("B")]) as bench:
        bench.add(20, params=params)
        bench.run()
        assert bench.child("A").seen_params == [{"remote_engine_id": "a", "shared": 0}]
        assert bench.child("B").seen_params == [{"remote_engine_id": "b", "shared": 0}]
        assert params == {"remote_engine_id": "a", "shared": 0, "raykv": {"B": {"remote_engine_id": "b"}}}


@pytest.mark.parametrize("order", ORDERS, ids="".join)
def test_a_child_that_edits_its_parameters_changes_no_others(
    order: tuple[str, ...], hosted: bool, overlap: bool
) -> None:
    """A switches `do_remote_prefill` off in place. B still sees it, also when both are asked again."""
    scripts: dict[str, Any] = {"A": {"pd": True, "failing": "request"}, "B": {"pd": True, "pending": 2}}
    children = [child(n, hosted, **scripts[n]) for n in order]
    with Bench(children, async_scheduling=overlap) as bench:
        given = {"do_remote_prefill": True, "nested": {"blocks": [1]}}
        bench.add(40, params=given)
        bench.run()
        assert given == {"do_remote_prefill": True, "nested": {"blocks": [1]}}
        assert {p["do_remote_prefill"] for p in bench.child("B").seen_params} <= {True, False}
        assert bench.child("B").seen_params[0] == given
        assert bench.child("A").seen_params[0] == given


def test_two_pd_connectors_are_refused_at_start_up() -> None:
    entries = [
        {"kv_connector": "NixlConnector", "kv_role": "kv_producer"},
        {"kv_connector": "MooncakeConnector", "kv_role": "kv_producer"},
    ]
    from raykv.config import parse
    from raykv.connector.start_checks import _check_pd

    config = parse({"kv_connector": "RayMultiConnector", "kv_connector_extra_config": {"connectors": entries}})
    with pytest.raises(ConfigError, match=r"NixlConnector.*MooncakeConnector.*remote_engine_id") as caught:
        _check_pd(config)
    assert "\n" not in str(caught.value)
