"""Changes of a running engine's chain: each order, with work in flight, on one and two ranks, in step on all."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from raykv.connector import chain_changes
from raykv.connector.scheduler_child import SchedulerChild
from raykv.engine_messages import ChildOp, OrderState, Progress
from raykv.errors import RayKVError
from tests.support import fake_config
from tests.support.chain_bench import ChainBench, child, ranged
from tests.support.fake_control import controls

pytestmark = pytest.mark.vllm

ADD, REMOVE, PAUSE, RESUME, RESTART, REORDER = ChildOp
LIMITS = {"max_faults": 1000, "retry_s": 0.01}
HOPELESS = {**LIMITS, "load_timeout_s": 0.3, "promise_timeout_s": 0.3, "timeout_s": 5.0}


def bench_of(*children: dict[str, Any], ranks: int = 1, overlap: bool = False, **more: Any) -> ChainBench:
    return ChainBench(children, ranks=ranks, async_scheduling=overlap, **more)


def loaded(bench: ChainBench, name: str) -> int:
    return sum(tokens for _, tokens in bench.child(name).allocated)


def living(bench: ChainBench, name: str) -> int:
    """Hosts of a child that live."""
    return sum(1 for process in bench.hosts.started if process.child == name and process.alive())


# -- add --------------------------------------------------------------------------------------------------------


def test_an_added_child_takes_part_from_then_on(ranks: int, hosted: bool, overlap: bool) -> None:
    with bench_of(child("A"), ranks=ranks, overlap=overlap) as bench:
        bench.add(100, max_tokens=30, name="before")
        bench.step(2)
        number = bench.add_child(child("B", hosted, hit=64, saves=True, late=True, auto_send=True, handshake=True))
        bench.done(number)
        assert bench.chain == ["A", "B"] and bench.status("before") != "GONE"
        keys = bench.child("B").handshakes
        assert set(keys) == set(range(ranks)), "its scheduler half has every rank's handshake"
        bench.add(100, name="after", seed=1)
        bench.finish("before", "after")
        assert {name for name, _ in bench.child("B").allocated} == {"after"}, "requests of before are not its"
        assert bench.total("B", "tokens_loaded") == 64
        bench.run()


def test_an_idle_engine_takes_a_child_in(hosted: bool, ranks: int) -> None:
    with bench_of(child("A"), ranks=ranks) as bench:
        assert not bench.scheduler.has_requests()
        number = bench.add_child(child("B", hosted, hit=64))
        assert bench.scheduler.has_requests(), "the engine keeps stepping while an order is open"
        bench.done(number)
        bench.run()
        assert not bench.scheduler.has_requests()


def test_a_child_is_added_in_front(hosted: bool) -> None:
    with bench_of(child("A", hit=32), child("C", hit=48)) as bench:
        bench.done(bench.add_child(child("B", hosted, hit=64), before="A"))
        assert bench.chain == ["B", "A", "C"]
        bench.add(100)
        bench.run()
        assert (loaded(bench, "A"), loaded(bench, "B")) == (0, 64), "the first one with tokens loads"


def test_an_added_child_composes(hosted: bool) -> None:
    with bench_of(ranged("A", hit=40), raykv={"load_policy": "compose"}) as bench:
        bench.done(bench.add_child(ranged("B", hosted, hit=80)))
        bench.add(100)
        bench.run()
        assert (loaded(bench, "A"), loaded(bench, "B")) == (32, 48)


def test_a_chain_of_inline_children_takes_a_hosted_one(ranks: int) -> None:
    with bench_of(child("A", hosted=False, saves=True, search=True), ranks=ranks) as bench:
        bench.done(bench.add_child(child("B", hit=64, saves=True, late=True, auto_send=True)))
        for seed in range(3):
            bench.add(60, seed=seed)
        bench.run()
        assert loaded(bench, "B") > 0


def test_a_child_whose_host_cannot_start_is_not_left_behind(ranks: int) -> None:
    with bench_of(child("A"), ranks=ranks) as bench:
        bench.hosts.unstartable.add("B")
        state = bench.ended(bench.add_child(child("B")))
        assert state.progress is Progress.FAILED and "B can't be started" in state.detail, state
        assert bench.chain == ["A"]
        bench.hosts.unstartable.clear()
        bench.done(bench.add_child(child("B", hit=64)))
        bench.add(100)
        bench.run()
        assert loaded(bench, "B") == 64


@pytest.mark.parametrize("hook", ["__init__", "register_kv_caches", "set_xfer_handshake_metadata"])
def test_a_child_that_raises_in_its_start_is_not_left_behind(hook: str, ranks: int, hosted: bool) -> None:
    """On one rank, or in its scheduler half: what the other ranks have made is ended."""
    with bench_of(child("A"), ranks=ranks) as bench:
        bench.add(100, max_tokens=40)
        state = bench.ended(bench.add_child(child("B", hosted, handshake=True, raises={hook: 1})))
        assert state.progress is Progress.FAILED and f"B raises in {hook}" in state.detail, state
        assert bench.chain == ["A"] and living(bench, "B") == 0
        assert not any(
            worker._worker_half._inline or ("B" in str(worker._worker_half._links)) for worker in bench.workers
        )
        bench.done(bench.add_child(child("B", hosted, hit=64)))
        bench.run()


def test_a_child_that_is_removed_while_it_starts(hosted: bool, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with bench_of(child("A"), ranks=ranks) as bench:
        gate = hold_start(bench, hosted, monkeypatch)
        add = bench.add_child(child("B", hosted))
        bench.step(3)
        remove = bench.order(REMOVE, "B")
        bench.step(3)
        gate.set()
        bench.done(remove)
        assert bench.state(add).progress is Progress.FAILED and "removed" in bench.state(add).detail
        assert bench.chain == ["A"] and living(bench, "B") == 0


def hold_start(bench: ChainBench, hosted: bool, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The start of an added child waits for the event: on its ranks, or (inline) in EngineCore's process."""
    gate = threading.Event()
    owner, name = (
        (bench.workers[0]._worker_half._chain._maker, "hosted") if hosted else (bench.connector._recovery, "build")
    )
    inner: Callable[..., Any] = getattr(owner, name)

    def held(*args: Any) -> Any:
        assert gate.wait(60)
        return inner(*args)

    monkeypatch.setattr(owner, name, held)
    return gate


def test_an_add_that_never_ends_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_changes, "MARGIN_S", 0.0)
    with bench_of(child("A")) as bench:
        gate = hold_start(bench, True, monkeypatch)
        number = bench.add_child(child("B", raykv={"startup_timeout_s": 0.1}))
        bench.until(lambda: "ending" in [c.place.value for c in bench.half.children], "the child to be given up")
        gate.set()
        state = bench.ended(number)
        assert state.progress is Progress.FAILED and "startup_timeout_s=0.1" in state.detail


# -- what is refused --------------------------------------------------------------------------------------------

TWO_GROUPS = {"window": 32}
REFUSED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("is no JSON", {"op": ADD, "child": "X", "config": "{"}, {}),
    ("must be an object", {"op": ADD, "child": "X", "config": "[]"}, {}),
    ("the new child.kv_connector is missing", {"op": ADD, "child": "X", "config": "{}"}, {}),
    ('Did you mean "kv_role"', {"op": ADD, "config": json.dumps({"kv_connector": "X", "kv_rol": "kv_both"})}, {}),
    ('is "Nixl", which is not', {"op": ADD, "config": json.dumps({"kv_connector": "Nixl"})}, {}),
    ("a name of its own", {"op": ADD, "child": "A", "config": json.dumps(child("A"))}, {}),
    ("Give one name", {"op": ADD, "child": "Y", "config": json.dumps(child("X"))}, {}),
    ('no child "Z"', {"op": ADD, "child": "X", "config": json.dumps(child("X")), "before": "Z"}, {}),
    (
        "hybrid KV cache manager",
        {"op": ADD, "config": json.dumps(fake_config.child("X", cls="FakeChildNoHMA"))},
        TWO_GROUPS,
    ),
    (
        "layout",
        {"op": ADD, "config": json.dumps(fake_config.child("X", cls="FakeChildHND"))},
        {"first": fake_config.child("A", cls="FakeChildNHD")},
    ),
    ("loads synchronously", {"op": ADD, "config": json.dumps({"kv_connector": "ExampleConnector"})}, {"overlap": True}),
    (
        "hand nothing over",
        {"op": ADD, "config": json.dumps(child("X"))},
        {
            "transfer": {"kv_role": "kv_consumer"},
            "first": child("A", fields={"kv_role": "kv_consumer"}),
            "second": child("B", False, fields={"kv_role": "kv_consumer"}),
        },
    ),
    ('Did you mean "A"', {"op": REMOVE, "child": "a"}, {}),
    ("no child", {"op": PAUSE, "child": "Z"}, {}),
    ("no child", {"op": RESUME, "child": "Z"}, {}),
    ("no child", {"op": RESTART, "child": "Z"}, {}),
    ("runs in vLLM's own workers", {"op": RESTART, "child": "B"}, {}),
    ("leaves out B", {"op": REORDER, "names": ("A",)}, {}),
    ("names A more than once", {"op": REORDER, "names": ("A", "B", "A")}, {}),
    ("no child", {"op": REORDER, "names": ("A", "B", "C")}, {}),
]


@pytest.mark.parametrize(("says", "order", "more"), REFUSED, ids=[f"{i}-{r[0]}" for i, r in enumerate(REFUSED)])
def test_what_is_wrong_is_refused_before_anything_changes(
    says: str, order: dict[str, Any], more: dict[str, Any]
) -> None:
    options = dict(more)
    first = options.pop("first", child("A"))
    second = options.pop("second", child("B", hosted=False))
    with bench_of(first, second, **options) as bench:
        config, chain, views = order.get("config", ""), bench.chain, bench.half.chain.views()
        if '"X"' in config:
            controls.pop("X", None)
        number = bench.order(**order)
        state = bench.ended(number)
        assert state.progress is Progress.REFUSED and says in state.detail, state
        assert bench.chain == chain and bench.half.children.next_index == 2
        assert [(v.name, v.state, v.config) for v in bench.half.chain.views()] == [
            (v.name, v.state, v.config) for v in views
        ]
        bench.add(40)


def test_what_is_on_its_way_takes_no_other_order(monkeypatch: pytest.MonkeyPatch) -> None:
    with bench_of(child("A"), child("C", hit=64, auto=False)) as bench:
        gate = hold_start(bench, True, monkeypatch)
        add = bench.add_child(child("B"))
        bench.add(100)
        bench.wait_for_kv("r0")
        remove = bench.order(REMOVE, "C")
        bench.step()
        for op, name, says in [(PAUSE, "B", "being started"), (RESTART, "B", "being started"), (PAUSE, "C", "removed")]:
            state = bench.ended(bench.order(op, name))
            assert state.progress is Progress.REFUSED and says in state.detail, state
        bench.done(bench.order(REORDER, names=("B", "A")))
        assert bench.chain[:2] == ["B", "A"], "one that leaves need not be named"
        gate.set()
        bench.child("C").report("recv", "r0")
        bench.done(remove)
        bench.done(add)


# -- remove -----------------------------------------------------------------------------------------------------


def test_a_removed_child_goes(ranks: int, hosted: bool, overlap: bool) -> None:
    with bench_of(child("A", hosted, hit=64, saves=True), child("B"), ranks=ranks, overlap=overlap) as bench:
        bench.add(100, max_tokens=60)
        bench.until(lambda: loaded(bench, "A") == 64, "the load")
        bench.step(6)
        shown = bench.child("A").calls["build_connector_meta"]
        bench.done(bench.order(REMOVE, "A"))
        assert bench.status("r0") == "RUNNING" and bench.chain == ["B"] and living(bench, "A") == 0
        assert bench.child("A").calls["shutdown"] >= 1
        asked = bench.child("A").asked.total()
        after = bench.child("A").calls["build_connector_meta"]
        assert after >= shown
        bench.add(100, seed=1)
        bench.run()
        assert bench.child("A").asked.total() == asked and bench.child("A").calls["build_connector_meta"] == after


def test_without_children_the_engine_computes(hosted: bool) -> None:
    with bench_of(child("A", hosted, hit=64)) as bench:
        bench.done(bench.order(REMOVE, "A"))
        assert bench.chain == [] and not bench.connector.supports_divergent_local_hybrid_hits
        bench.add(100)
        bench.run()
        assert loaded(bench, "A") == 0
        bench.done(bench.add_child(child("A", hosted, hit=64)))
        bench.add(100, seed=1)
        bench.run()
        assert loaded(bench, "A") == 64


def test_a_load_in_flight_ends_first(ranks: int, hosted: bool, overlap: bool) -> None:
    with bench_of(child("A", hosted, hit=64, auto=False), child("B"), ranks=ranks, overlap=overlap) as bench:
        bench.add(100)
        bench.wait_for_kv("r0")
        number = bench.order(REMOVE, "A")
        bench.step(8)
        assert bench.state(number).progress is Progress.RUNNING and bench.chain == ["A", "B"]
        bench.add(100, seed=1, name="other")
        bench.finish("other")
        assert bench.child("A").asked["other"] == 0, "it is asked for nothing new"
        bench.child("A").report("recv", "r0")
        bench.done(number)
        bench.finish("r0")
        assert bench.total("A", "tokens_loaded") == 64 and bench.total("A", "load_failures") == 0


def test_an_owed_send_is_settled_first(ranks: int, hosted: bool, overlap: bool) -> None:
    with bench_of(child("A", hosted, owes=True), child("B"), ranks=ranks, overlap=overlap) as bench:
        bench.add(100)
        bench.finish("r0")
        bench.step(4)
        number = bench.order(REMOVE, "A")
        bench.step(8)
        assert bench.state(number).progress is Progress.RUNNING and bench.used_blocks == 7
        for rank in range(ranks):
            assert bench.used_blocks == 7
            bench.child("A").report("send", "r0", [rank])
            bench.step(4)
        bench.done(number)
        bench.run()


def test_a_request_that_ends_while_its_child_leaves_is_kept_its_word(ranks: int, hosted: bool) -> None:
    """A load keeps the child there; another request that it knows ends meanwhile, and its send is owed and settled."""
    with bench_of(child("A", hosted, hits={"a": 64}, auto=False, owes=True), ranks=ranks) as bench:
        bench.add(100, name="a")
        bench.add(60, name="b", max_tokens=12, seed=1)
        bench.wait_for_kv("a")
        number = bench.order(REMOVE, "A")
        bench.finish("b")
        bench.step(4)
        assert bench.used_blocks >= 4, "what it still reads of b is kept"
        bench.child("A").report("send", "b")
        bench.child("A").report("recv", "a")
        bench.finish("a")
        bench.step(4)
        if bench.state(number).progress is Progress.RUNNING:  # a has ended before its child was settled
            bench.child("A").report("send", "a")
        bench.done(number)


def test_saves_that_are_late_never_read_what_is_anothers(ranks: int, hosted: bool, overlap: bool) -> None:
    """Its hosts read at any time until they are dead: what running requests lose meanwhile is kept until then."""
    children = [
        child("A", hosted, saves=True, late=True, auto=False, auto_send=True),
        child("B", search=True, saves=True),
    ]
    with bench_of(*children, ranks=ranks, overlap=overlap, num_blocks=16, sequences=6) as bench:
        for seed in range(5):
            bench.add(60, seed=seed, max_tokens=30)
        bench.step(3)
        number = bench.order(REMOVE, "A")
        bench.done(number)
        bench.run()


def test_a_send_is_owed_for_blocks_that_came_after_the_last_hosted_child_had_gone() -> None:
    """The request's first blocks were pinned for that one; all of them are, when an inline child reads them."""
    with bench_of(child("A", saves=True), child("B", False, owes=True), num_blocks=64) as bench:
        bench.add(40, max_tokens=200)
        bench.step(4)
        bench.done(bench.order(REMOVE, "A"))
        assert bench.status("r0") == "RUNNING"
        bench.finish("r0")
        bench.step(4)
        assert bench.used_blocks == 15, "all blocks of 240 tokens wait for B"
        bench.add(300, seed=1, max_tokens=100)
        bench.finish("r1")
        bench.child("B").report("send", "r0")
        bench.child("B").report("send", "r1")
        bench.run()


@pytest.mark.parametrize("aborted", [False, True])
def test_blocks_that_come_free_while_the_scheduler_half_shuts_down(
    aborted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its hosts are dead by then, so nobody waits for them any more: else these blocks were never given back."""
    gate, reached = threading.Event(), threading.Event()
    shut_down = SchedulerChild.shutdown

    def held(self: SchedulerChild) -> None:
        reached.set()
        assert gate.wait(60)
        shut_down(self)

    with bench_of(child("A", saves=True), child("B", saves=True)) as bench:
        bench.add(100, max_tokens=400)
        bench.step(4)
        monkeypatch.setattr(SchedulerChild, "shutdown", held)
        number = bench.order(REMOVE, "A")
        bench.until(reached.is_set, "the shutdown")
        if aborted:
            bench.abort("r0")
        else:
            bench.finish("r0")
        gate.set()
        bench.done(number)
        bench.run()


def test_hosts_that_die_while_their_child_leaves(ranks: int, overlap: bool) -> None:
    children = [child("A", hits={"load": 64}, auto=False, owes=True, raykv=LIMITS), child("B")]
    with bench_of(*children, ranks=ranks, overlap=overlap) as bench:
        bench.add(20, name="owed")
        bench.finish("owed")
        bench.add(100, name="load", seed=1)
        bench.wait_for_kv("load")
        number = bench.order(REMOVE, "A")
        bench.step(2)
        for rank in range(ranks):
            bench.host("A", rank).die()
        bench.done(number)
        bench.finish("load")
        assert living(bench, "A") == 0 and bench.total("A", "tokens_loaded") == 0
        bench.run()


@pytest.mark.parametrize("kind", ["load", "send"])
def test_what_never_ends_is_ended_by_the_childs_own_limit(kind: str, ranks: int) -> None:
    with bench_of(
        child("A", hit=64 if kind == "load" else 0, auto=False, owes=kind == "send", raykv=HOPELESS), ranks=ranks
    ) as bench:
        bench.add(100)
        if kind == "load":
            bench.wait_for_kv("r0")
        else:
            bench.finish("r0")
        bench.done(bench.order(REMOVE, "A"))
        bench.run()
        assert living(bench, "A") == 0


def test_an_inline_child_that_never_lets_go_is_said_to_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_changes, "MARGIN_S", 0.0)
    with bench_of(child("A", False, owes=True, raykv=HOPELESS), child("B")) as bench:
        bench.add(100)
        bench.finish("r0")
        state = bench.ended(bench.order(REMOVE, "A"))
        assert state.progress is Progress.FAILED and "not let go of its blocks" in state.detail
        assert bench.used_blocks == 7, "wrong tokens are never risked for it"
        bench.child("A").report("send", "r0")
        bench.until(lambda: bench.chain == ["B"], "it goes after all")


def test_a_removed_name_can_come_again(ranks: int, hosted: bool) -> None:
    """As another child: a new index, a new engine id, and nothing late of the old one counts for it."""
    with bench_of(child("A", hosted, hit=64), ranks=ranks) as bench:
        for turn in range(3):
            bench.add(100, seed=turn)
            bench.finish(f"r{turn}")
            bench.done(bench.order(REMOVE, "A"))
            bench.done(bench.add_child(child("A", hosted, hit=64)))
        ids = [config.engine_id for config in bench.child("A").configs]
        assert len(set(ids)) == 4 and bench.half.children.next_index == 4
        bench.run()
        assert bench.total("A", "tokens_loaded") == 192


# -- pause and resume -------------------------------------------------------------------------------------------


def test_a_paused_child_is_asked_nothing_and_saves_nothing(ranks: int, hosted: bool, overlap: bool) -> None:
    with bench_of(
        child("A", hosted, hits={"l": 64}, auto=False, saves=True), ranks=ranks, overlap=overlap, batched_tokens=48
    ) as bench:
        control = bench.child("A")
        bench.add(100, name="l")
        bench.wait_for_kv("l")
        bench.add(200, name="long", seed=1)
        bench.step(3)
        bench.done(bench.order(PAUSE, "A"))
        bench.step(4)
        saved = len(control.store)
        bench.add(100, name="new", seed=2)
        bench.finish("long", "new")
        assert control.asked["new"] == 0 and len(control.store) == saved
        control.report("recv", "l")
        bench.finish("l")
        assert bench.total("A", "tokens_loaded") == 64, "what it had begun ended as usual"
        assert [view.state for view in bench.half.chain.views()] == ["off"]
        bench.done(bench.order(PAUSE, "A"))
        bench.done(bench.order(RESUME, "A"))
        bench.add(100, name="l2", seed=3)
        control.hits["l2"], control.auto = 64, True
        bench.run()
        assert bench.total("A", "tokens_loaded") == 128 and len(control.store) > saved
        assert [view.state for view in bench.half.chain.views()] == ["up"]


def test_requests_of_before_the_pause_are_not_resumed(hosted: bool) -> None:
    """The child has not seen some of their steps, so what it would plan for them is not right any more."""
    with bench_of(child("A", hosted, saves=True), batched_tokens=32) as bench:
        bench.add(200, name="long", max_tokens=8)
        bench.step(2)
        bench.done(bench.order(PAUSE, "A"))
        bench.step(2)
        bench.done(bench.order(RESUME, "A"))
        bench.step(3)
        saved = len(bench.child("A").store)
        bench.finish("long")
        bench.run()
        assert len(bench.child("A").store) == saved and bench.half.children.find("A").known == set()
        bench.run()


def test_a_paused_child_keeps_its_word(ranks: int, hosted: bool) -> None:
    with bench_of(child("A", hosted, owes=True), ranks=ranks) as bench:
        bench.add(100)
        bench.step(2)
        bench.done(bench.order(PAUSE, "A"))
        bench.finish("r0")
        bench.step(4)
        assert bench.used_blocks == 7
        bench.child("A").report("send", "r0")
        bench.run()


# -- restart ----------------------------------------------------------------------------------------------------


def test_a_restarted_child_has_new_hosts(ranks: int, overlap: bool) -> None:
    with bench_of(child("A", hit=64, raykv=LIMITS), ranks=ranks, overlap=overlap) as bench:
        bench.add(100, max_tokens=40)
        bench.step(6)
        bench.done(bench.order(RESTART, "A"))
        assert bench.half.children.find("A").incarnations == (1,) * ranks
        bench.add(100, seed=1)
        bench.run()
        assert loaded(bench, "A") == 128 and bench.total("A", "load_failures") == 0
        assert living(bench, "A") == ranks and len(bench.hosts.started) == 2 * ranks


def test_a_restart_waits_for_loads(ranks: int) -> None:
    with bench_of(
        child("A", hit=64, auto=False, raykv=LIMITS), ranks=ranks, transfer={"kv_load_failure_policy": "fail"}
    ) as bench:
        bench.add(100)
        bench.wait_for_kv("r0")
        number = bench.order(RESTART, "A")
        bench.step(6)
        assert bench.half.children.find("A").incarnations == (0,) * ranks
        bench.child("A").report("recv", "r0")
        bench.done(number)
        bench.finish("r0")
        assert bench.results["r0"].reason.name != "ERROR" and bench.total("A", "tokens_loaded") == 64


def test_a_restart_while_paused_and_a_pause_while_restarting() -> None:
    with bench_of(child("A", hit=64, raykv=LIMITS)) as bench:
        bench.done(bench.order(PAUSE, "A"))
        bench.done(bench.order(RESTART, "A"))
        assert [view.state for view in bench.half.chain.views()] == ["off"]
        bench.done(bench.order(RESUME, "A"))
        numbers = [
            bench.order(RESTART, "A"),
            bench.order(PAUSE, "A"),
            bench.order(RESTART, "A"),
            bench.order(RESUME, "A"),
        ]
        for number in numbers:
            bench.done(number)
        bench.add(100)
        bench.run()
        assert loaded(bench, "A") == 64


def test_a_restart_that_never_ends_fails_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_changes, "MARGIN_S", 0.0)
    limits = {**HOPELESS, "startup_timeout_s": 0.2}
    with bench_of(child("A", hit=64, raykv=limits)) as bench:
        bench.hosts.unstartable.add("A")
        state = bench.ended(bench.order(RESTART, "A"))
        assert state.progress is Progress.FAILED and "go on being tried" in state.detail
        assert [view.state for view in bench.half.chain.views()] == ["down"]
        bench.hosts.unstartable.clear()
        bench.until(lambda: bench.half.chain.views()[0].state == "up", "it to come back")


def test_a_child_that_is_removed_while_it_restarts(ranks: int) -> None:
    with bench_of(child("A", raykv=LIMITS), child("B"), ranks=ranks) as bench:
        bench.hosts.unstartable.add("A")
        restart = bench.order(RESTART, "A")
        bench.step(4)
        bench.done(bench.order(REMOVE, "A"))
        assert bench.state(restart).progress is Progress.FAILED and living(bench, "A") == 0


# -- reorder, numbers, views ------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["first", "compose"])
def test_the_order_decides_who_loads(policy: str, hosted: bool) -> None:
    with bench_of(ranged("A", hosted, hit=64), ranged("B", hosted, hit=64), raykv={"load_policy": policy}) as bench:
        bench.add(100)
        bench.run()
        bench.done(bench.order(REORDER, names=("B", "A")))
        bench.add(100, seed=1)
        bench.run()
        assert (loaded(bench, "A"), loaded(bench, "B")) == (64, 64)
        assert [view.name for view in bench.half.chain.views()] == ["B", "A"]


def test_a_number_is_carried_out_once() -> None:
    with bench_of(child("A"), child("B")) as bench:
        bench.done(bench.order(REMOVE, "A", number="n"))
        bench.order(REMOVE, "B", number="n")
        bench.step(3)
        assert bench.chain == ["B"] and [s.number for s in bench.half.chain.states()] == ["n"]


def test_two_removals_of_one_child_both_end() -> None:
    with bench_of(child("A"), child("B")) as bench:
        first, second = bench.order(REMOVE, "A"), bench.order(REMOVE, "A")
        bench.done(first)
        bench.done(second)


def test_orders_are_begun_as_they_came() -> None:
    with bench_of(child("A")) as bench:
        add = bench.add_child(child("B"))
        rest = [bench.order(REORDER, names=("B", "A")), bench.order(REMOVE, "A")]
        for number in [add, *rest]:
            bench.done(number) if number != add else bench.ended(number)
        assert bench.chain == ["B"]


def test_views_and_statistics_count_children_that_come_and_go(ranks: int, hosted: bool) -> None:
    with bench_of(child("A"), ranks=ranks) as bench:
        bench.done(bench.add_child(child("B", hosted, hit=64, stats=True)))
        bench.add(100)
        bench.run()
        bench.until(lambda: "tokens_loaded" in view_of(bench, "B").counters, "the counters to be copied")
        view = view_of(bench, "B")
        assert (view.counters["tokens_loaded"], view.run, view.loads) == (64, "actor" if hosted else "inline", True)
        assert (
            len(view.host_pids) == (ranks if hosted else 0) and json.loads(view.config)["kv_connector"] == "EndingChild"
        )
        bench.done(bench.order(REMOVE, "B"))
        bench.add(40, seed=1)
        bench.run()
        assert any(stats["B"]["gauges"]["up"] == 0 for stats in bench.stats if "B" in stats)
        assert [view.name for view in bench.half.chain.views()] == ["A"]
        assert bench.total("B", "restarts") == 0, "an end that was ordered is no fault"


def view_of(bench: ChainBench, name: str) -> Any:
    bench.add(20, name=f"tick{len(bench.results)}", max_tokens=1)
    bench.run()
    return next(view for view in bench.half.chain.views() if view.name == name)


def test_orders_from_another_thread() -> None:
    with bench_of(child("A"), child("B")) as bench:
        threads = [
            threading.Thread(target=bench.order, args=(op, name), kwargs={"number": f"{op}{name}{i}"})
            for i in range(5)
            for op, name in ((PAUSE, "A"), (RESUME, "A"), (PAUSE, "B"), (RESUME, "B"))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        bench.until(lambda: all(state.progress.final for state in bench.half.chain.states()), "all orders")
        states: list[OrderState] = bench.half.chain.states()
        assert len(states) == 20 and all(state.progress is Progress.DONE for state in states)


def test_a_defect_in_an_order_does_not_end_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    with bench_of(child("A")) as bench:

        def broken(*args: Any) -> None:
            raise RayKVError("a defect")

        monkeypatch.setattr(bench.half.chain, "_reorder", broken)
        state = bench.ended(bench.order(REORDER, names=("A",)))
        assert state.progress is Progress.FAILED and "a defect" in state.detail
        bench.add(40)
        bench.run()
