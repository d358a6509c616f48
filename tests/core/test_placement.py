"""Placement against brute force, and what must hold for every plan."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raykv.config.cluster_parse import parse_spec
from raykv.config.cluster_spec import ClusterSpec
from raykv.core.placement import Node, PlacementError, Plan, place, place_all
from raykv.store_messages import Medium

GIB = 1 << 30


def node(name: str, gpus: float = 0, cpus: float = 8, memory: int | None = 64 * GIB, **more: Any) -> Node:
    total = {"GPU": gpus, "CPU": cpus}
    return Node(name, name, total=total, free=more.pop("free", total), memory=memory, **more)


def spec(*engines: dict[str, Any], **more: Any) -> ClusterSpec:
    return parse_spec({"model": "m", "engines": [dict(engine) for engine in engines], **more})


def holds(wanted: ClusterSpec, nodes: list[Node], plan: Plan) -> None:
    """What every plan must keep."""
    by_id = {one.id: one for one in nodes}
    used: Counter[tuple[str, str]] = Counter()
    for engine, index in wanted.replicas:
        place_of = plan.engines.get(engine.replica(index))
        assert (place_of is None) == (engine.replica(index) in plan.unplaced)
        if place_of is None:
            continue
        where = by_id[place_of]
        assert where.usable
        assert not engine.selector.why_not(where.labels, where.total)
        for name, amount in engine.selector.resources.items():
            used[where.id, name] += amount
        store = wanted.store(engine.store)
        if store is not None:
            assert (store.name, where.id) in plan.stores
            assert store.selector is None or not store.selector.why_not(where.labels, where.total)
    for (id, name), amount in used.items():
        assert amount <= by_id[id].free.get(name, 0) + 1e-6
    host: Counter[str] = Counter()
    for name, id in plan.stores:
        store = wanted.store(name)
        assert store is not None
        host[id] += store.nbytes(Medium.HOST)
    for id, nbytes in host.items():
        memory = by_id[id].memory
        assert memory is None or nbytes <= memory


engines = st.lists(
    st.fixed_dictionaries(
        {
            "replicas": st.integers(1, 2),
            "resources": st.fixed_dictionaries(
                {"num_gpus": st.integers(0, 2), "num_cpus": st.integers(0, 3)},
                optional={"labels": st.just({"pool": "a"})},
            ),
            "placement": st.sampled_from(["spread", "pack"]),
            "store": st.sampled_from(["small", "large", "labelled"]),
        }
    ),
    min_size=1,
    max_size=3,
).map(lambda entries: [{"name": f"e{number}", **entry} for number, entry in enumerate(entries)])
STORES = [
    {"store": "small", "size": GIB},
    {"store": "large", "size": 10 * GIB},
    {"store": "labelled", "size": 2 * GIB, "nodes": {"labels": {"pool": "a"}}},
]
clusters = st.lists(
    st.builds(
        lambda gpus, cpus, memory, pool, usable: (gpus, cpus, memory, pool, usable),
        st.integers(0, 3),
        st.integers(0, 5),
        st.sampled_from([None, 1 * GIB, 4 * GIB, 20 * GIB]),
        st.sampled_from(["a", "b"]),
        st.sampled_from([True, True, True, False]),
    ),
    min_size=1,
    max_size=4,
).map(
    lambda rows: [
        node(f"n{i}", gpus, cpus, memory, labels={"pool": pool}, usable=usable)
        for i, (gpus, cpus, memory, pool, usable) in enumerate(rows)
    ]
)


def with_stores(entries: list[dict[str, Any]]) -> ClusterSpec:
    stores = [
        {"name": one["store"], "tiers": [{"medium": "host", "capacity": one["size"]}]}
        | ({"nodes": one["nodes"]} if "nodes" in one else {})
        for one in STORES
    ]
    return spec(*entries, stores=stores)


@given(engines, clusters)
def test_every_plan_keeps_the_rules(entries: list[dict[str, Any]], nodes: list[Node]) -> None:
    wanted = with_stores(entries)
    plan = place(wanted, nodes)
    holds(wanted, nodes, plan)
    assert place(wanted, list(reversed(nodes))).engines.keys() == plan.engines.keys()
    # What was placed stays when it is asked again.
    again = place(wanted, nodes, plan.engines)
    assert {r: n for r, n in again.engines.items() if r in plan.engines} == dict(plan.engines)


@given(engines, clusters)
def test_a_way_is_found_where_there_is_one(entries: list[dict[str, Any]], nodes: list[Node]) -> None:
    wanted = with_stores(entries)
    if place(wanted, nodes).unplaced:
        usable = [one for one in nodes if one.usable]
        assert not any(
            fits(wanted, usable, dict(zip([e.replica(i) for e, i in wanted.replicas], chosen, strict=True)))
            for chosen in itertools.product([one.id for one in usable], repeat=len(wanted.replicas))
        )


def fits(wanted: ClusterSpec, nodes: list[Node], engines: dict[str, str]) -> bool:
    stores = set()
    for one in nodes:
        selected = [s for s in wanted.stores if s.selector and not s.selector.why_not(one.labels, one.total)]
        if one.memory is None or sum(s.nbytes(Medium.HOST) for s in selected) <= one.memory:
            stores |= {(s.name, one.id) for s in selected}
    for engine, index in wanted.replicas:
        store = wanted.store(engine.store)
        if store is not None and store.selector is not None:
            if (store.name, engines[engine.replica(index)]) not in stores:
                return False
        elif store is not None:
            stores.add((store.name, engines[engine.replica(index)]))
    try:
        holds(wanted, nodes, Plan(engines, frozenset(stores), {}))
    except AssertionError:
        return False
    return True


def test_spread_and_pack() -> None:
    nodes = [node(f"n{i}", gpus=4) for i in range(3)]
    spread = place(spec({"name": "e", "replicas": 6, "resources": {"num_gpus": 1}}), nodes)
    assert set(Counter(spread.engines.values()).values()) == {2}
    pack = place(spec({"name": "e", "replicas": 6, "resources": {"num_gpus": 1}, "placement": "pack"}), nodes)
    assert sorted(Counter(pack.engines.values()).values()) == [2, 4]


def test_what_runs_stays_and_what_is_new_goes_round_it() -> None:
    nodes = [node("n1", gpus=1), node("n2", gpus=1)]
    wanted = spec({"name": "e", "replicas": 2, "resources": {"num_gpus": 1}})
    assert place(wanted, nodes, {"e-1": "n1"}).engines == {"e-0": "n2", "e-1": "n1"}


def test_a_decode_engine_is_not_put_where_its_tiers_can_not_be() -> None:
    wanted = spec(
        {"name": "e", "replicas": 2, "resources": {"num_gpus": 1}}, tiers=[{"medium": "host", "capacity": 8 * GIB}]
    )
    nodes = [node("small", gpus=8, memory=4 * GIB), node("large", gpus=8, memory=16 * GIB)]
    assert set(place(wanted, nodes).engines.values()) == {"large"}
    on_disk = spec({"name": "e"}, tiers=[{"medium": "disk", "path": "/kv", "capacity": 8 * GIB}])
    full = node("full", disks={"/kv": GIB})
    with pytest.raises(
        PlacementError, match=r"the disk tier of store default has 8.0 GiB and full \(full\) has 1.0 GiB"
    ):
        place_all(on_disk, [full])
    assert place_all(on_disk, [full, node("roomy", disks={"/kv": 9 * GIB})]).engines == {"e-0": "roomy"}


def test_stores_are_on_the_nodes_of_their_selector_with_and_without_engines() -> None:
    stores = [{"tiers": [{"medium": "host", "capacity": GIB}], "nodes": {"labels": {"kv": "yes"}}}]
    nodes = [node("a", labels={"kv": "yes"}), node("b", labels={"kv": "yes"}), node("c")]
    plan = place_all(spec({"name": "e"}, stores=stores), nodes)
    assert plan.stores == {("default", "a"), ("default", "b")}
    assert plan.engines["e-0"] in ("a", "b")


@pytest.mark.parametrize(
    ("engine", "more", "match"),
    [
        (
            {"resources": {"labels": {"pool": "x"}}},
            {},
            r"label pool=x is not on it \(it has (no label pool|pool=\w+)\)",
        ),
        ({"resources": {"num_gpus": 3}}, {}, "it has 2 of GPU and 3 is wanted"),
        ({"replicas": 3, "resources": {"num_gpus": 1}}, {}, "0 of its 2 GPU are free"),
        ({}, {"tiers": [{"medium": "host", "capacity": 100 * GIB}]}, "has 100.0 GiB and n1"),
        (
            {},
            {"stores": [{"tiers": [{"medium": "host", "capacity": 1}], "nodes": {"labels": {"kv": "y"}}}]},
            "Store default finds no node",
        ),
    ],
)
def test_the_reason_is_said(engine: dict[str, Any], more: dict[str, Any], match: str) -> None:
    if "stores" in more:
        more["stores"][0]["tiers"][0]["capacity"] = GIB
    with pytest.raises(PlacementError, match=match):
        place_all(spec({"name": "e", **engine}, **more), [node("n1", gpus=2)])


def test_a_model_that_is_not_there() -> None:
    nodes = [node("n1", model=False), node("n2", model=True)]
    assert place_all(spec({"name": "e"}), nodes).engines == {"e-0": "n2"}
    with pytest.raises(PlacementError, match="the model m does not exist on it"):
        place_all(spec({"name": "e"}), nodes[:1])


def test_a_large_cluster_that_is_too_small_is_told_in_time() -> None:
    nodes = [node(f"n{i}", gpus=8) for i in range(40)]
    plan = place(spec({"name": "e", "replicas": 321, "resources": {"num_gpus": 1}}), nodes)
    assert len(plan.engines) == 320
    assert len(plan.unplaced) == 1


def test_one_without_a_place_takes_nobodys_that_runs() -> None:
    """`e-0` was ended for a changed spec; the others run as the old one wanted them, and stay where they are."""
    wanted = spec({"name": "e", "replicas": 3, "resources": {"num_gpus": 1}})
    plan = place(wanted, [node("a", 2), node("b", 2)], preferred={"e-1": "a", "e-2": "a"})
    assert plan.engines == {"e-0": "b", "e-1": "a", "e-2": "a"}
