"""An operator at work: two real engines with one store under a load that never rests, and every operation on them."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from raykv.errors import RayKVError
from tests.support.live_changes import Changes
from tests.support.operated import (
    BLOCK,
    DISK,
    EXAMPLE,
    HOST,
    SLOT,
    TIERS,
    CommandFailed,
    Operated,
    new_example,
    operated,
)
from tests.support.operated_checks import (
    as_json,
    attempt,
    desk_pid,
    explained,
    in_a_shell,
    media,
    reasons,
    spoiled_on_disk,
    state,
    store_pid,
    tag,
    timed,
    to_disk,
    whole,
)
from tests.support.prompts import MAX_TOKENS, PROMPTS
from tests.support.ray_cluster import RayCluster
from tests.support.waiting import eventually

pytestmark = [pytest.mark.engine, pytest.mark.ray, pytest.mark.timeout(900)]

WAYS = ("api", "command")


@pytest.fixture(scope="module")
def at(
    tiny_model: Path, ray_cluster: RayCluster, tmp_path_factory: pytest.TempPathFactory, baseline: dict[str, list[int]]
) -> Iterator[Operated]:
    with operated(tiny_model, ray_cluster, tmp_path_factory.mktemp("operated"), baseline) as made:
        yield made


@pytest.fixture(autouse=True)
def loaded(at: Operated) -> Iterator[None]:
    """Each test runs under load; afterwards nothing was wrong, and it still runs."""
    before = at.check_load()
    yield
    at.check_integrity()
    eventually(lambda: at.check_load() > before, "request of the load")


@pytest.mark.parametrize("way", WAYS)
def test_where_tokens_come_from(at: Operated, way: str) -> None:
    """Cold, from the host, from the disk, cleared, by the other engine: `lookup` and `explain` are right each time."""
    do, name = getattr(at, way), {"api": "long", "command": "page"}[way]
    prompt, size = PROMPTS[name], len(PROMPTS[name])
    with at.quiet():
        for engine in at.engines:
            do("child pause", EXAMPLE, engine=engine)
        do("clear", everything=True)  # the other way, or another test, has been here
        cold = at.ask("one", name)
        told = explained(at, way, cold.request_id, "one")
        assert told["by_source"] == {"computed": size}
        assert ({"never stored", "cleared"} & reasons(told)) and "not found" not in reasons(told)
        found = do("lookup", prompt=prompt, engine="one")
        assert found["held_tokens"] == size // BLOCK * BLOCK and media(found) == {("host",)}
        warm = at.ask("one", name)
        assert explained(at, way, warm.request_id, "one")["by_source"] == {
            "host": whole(name),
            "computed": size - whole(name),
        }
        other = at.ask("two", name)
        assert explained(at, way, other.request_id, "two")["by_source"]["host"] == whole(name)
        to_disk(at, name)
        assert media(do("lookup", prompt=prompt, engine="two")) == {("disk",)}
        slow = at.ask("two", name)
        told = explained(at, way, slow.request_id, "two")
        assert told["by_source"]["disk"] == whole(name) and told["load_s"] > 0
        to_disk(at, name)
        assert do("prefetch", prompt=prompt, tier="host", engine="one")["ok"]
        assert ("host", "disk") in media(do("lookup", prompt=prompt, engine="one"))
        assert do("clear", everything=True)["blocks"] >= size // BLOCK
        assert do("lookup", prompt=prompt, engine="one")["held_tokens"] == 0
        gone = at.ask("one", name)
        told = explained(at, way, gone.request_id, "one")
        assert told["by_source"] == {"computed": size} and "cleared" in reasons(told)
        for engine in at.engines:
            do("child resume", EXAMPLE, engine=engine)
        known = at.kv.requests().to_dict() if way == "api" else do("explain")
        assert any(str(one).startswith(gone.request_id) for one in known)
    for engine in at.engines:
        at.wait_child(engine, EXAMPLE, "up")


def test_why_it_was_a_miss(at: Operated) -> None:
    """What left a store says how: thrown out, also when a pin's time was over, or rotten. A paused child is off."""
    disk = at.tier("disk").path
    with at.quiet():
        for engine in at.engines:
            at.kv.pause_child(EXAMPLE, engine=engine)
        at.kv.clear(everything=True)
        at.ask("one", "page")
        at.kv.pause_child(TIERS, engine="one")
        at.wait_child("one", TIERS, "off")
        told = explained(at, "command", at.ask("one", "page").request_id, "one")
        assert told["by_source"] == {"computed": len(PROMPTS["page"])} and reasons(told) >= {"child off"}
        at.kv.resume_child(TIERS, engine="one")
        at.wait_child("one", TIERS, "up")
        spoiled_on_disk(at, "page")
        assert "load failed" in reasons(explained(at, "api", at.ask("one", "page").request_id, "one"))
        told = explained(at, "command", at.ask("two", "page").request_id, "two")
        assert told["by_source"].get("host") == whole("page"), "what was computed again was saved again"
        spoiled_on_disk(at, "page")
        at.kv.verify()
        assert at.tier("disk").bad_reads
        told = explained(at, "api", at.ask("one", "page").request_id, "one")
        assert "failed its check" in reasons(told) and told["by_source"] == {"computed": len(PROMPTS["page"])}
        assert at.kv.remove_tier("disk").ok
        at.kv.clear(everything=True)
        for name in ("page", "aligned"):
            at.ask("one", name)
        at.kv.pin(PROMPTS["page"], "1s", engine="one")
        eventually(lambda: not at.kv.pins(), "end of a pin's time")
        at.kv.resize_tier("host", 40 * SLOT)
        for name in ("long", "branch2"):
            at.ask("two", name)
        for name, why in (("page", "expired"), ("aligned", "evicted")):
            assert not at.kv.lookup(PROMPTS[name], engine="one").held_tokens
            told = explained(at, "command", at.ask("one", name).request_id, "one")
            assert why in reasons(told) and told["by_source"] == {"computed": len(PROMPTS[name])}
        at.kv.resize_tier("host", HOST)
        assert at.kv.add_tier("disk", DISK, path=disk).ok
        for engine in at.engines:
            at.kv.resume_child(EXAMPLE, engine=engine)
            at.wait_child(engine, EXAMPLE, "up")


def test_what_there_is(at: Operated) -> None:
    """One node with both engines and their store, by every way to see it; while the load runs `top` has its rates."""
    [node] = at.kv.nodes
    status = json.loads(in_a_shell("status", "--json"))
    [seen] = [one for one in status["nodes"] if one["alive"]]
    assert node.id == seen["node_id"] == at.kv.node(node.id[:6]).id and node.state == "alive"
    assert set(node.engines) == set(at.engines) == {one["id"] for one in status["engines"]}
    [store] = at.kv.stores
    assert node.stores == (store.actor,) and {row["name"] for row in status["stores"]} == {store.actor}
    assert {row["pid"] for row in status["stores"]} == {store.pid}
    frame = timed("top", at.command, "top", once=True, every=3)
    assert {one["id"] for one in frame["engines"]} == set(at.engines)
    assert all(sum(by_source.values()) > 0 for by_source in frame["rates"]["tokens"].values())
    assert frame["rates"]["stores"][store.actor]["look_ups"] > 0
    before = {name: sum(at.kv.engine(name).tokens.values()) for name in at.engines}
    eventually(lambda: all(sum(at.kv.engine(n).tokens.values()) > before[n] for n in before), "more tokens")
    assert [one.id for one in asyncio.run(nodes_of(at))] == [node.id]
    text = in_a_shell("top", "--once")
    assert [part for part in ("one", "two", EXAMPLE, TIERS, store.at, "host", "disk") if part not in text] == [], text


async def nodes_of(at: Operated) -> Any:
    """By a coroutine."""
    snapshot, store = await asyncio.gather(at.kv.aio.snapshot(), at.kv.aio.store(at.store_name))
    assert store.actor in snapshot.nodes[0].stores
    return snapshot.nodes


def test_the_machine_is_examined(at: Operated, tmp_path: Path) -> None:
    found = timed("doctor", at.command, "doctor", disk=tmp_path)
    checks = {one["check"]: one for one in found["findings"]}
    assert found["errors"] == 0, [one for one in found["findings"] if one["level"] == "error"]
    assert checks["Ray"]["level"] == "ok" and at.kv.address in checks["Ray"]["said"]
    assert all(checks[f"engine {name}"]["level"] == "ok" for name in at.engines)
    assert checks[f"disk {tmp_path}"]["level"] != "error" and f"store {at.kv.stores[0].at}" in checks
    figures = timed("bench", at.command, "bench", size="64MiB", disk=tmp_path)["figures"]
    assert {one["what"] for one in figures} >= {"memcpy", "host tier", "disk tier, write", "disk tier, read"}
    assert all(one["gbs"] > 0 for one in figures) and not list(tmp_path.iterdir())


def test_the_story_in_the_answer(at: Operated) -> None:
    with at.quiet("one"):
        result = at.ask("one", "aligned", kv_transfer_params={"raykv_explain": True})
        plain = at.ask("one", "aligned")
    assert result.kv_transfer_params is not None and "raykv_story" not in (plain.kv_transfer_params or {})
    story = result.kv_transfer_params["raykv_story"]
    assert story["prompt_tokens"] == len(PROMPTS["aligned"])
    assert sum(one["last"] - one["first"] for one in story["ranges"]) == story["prompt_tokens"]


@pytest.mark.parametrize("way", WAYS)
def test_pins(at: Operated, way: str) -> None:
    """Under pressure what is pinned stays where it is; unpinned it goes."""
    do, kept = getattr(at, way), PROMPTS["page"]
    blocks = len(kept) // BLOCK
    with at.quiet():
        for engine in at.engines:
            at.kv.pause_child(EXAMPLE, engine=engine)
        do("clear", everything=True)
        at.ask("one", "page")
        pin = do("pin", prompt=kept, time_limit="10m", engine="one", note="a test")
        assert pin["blocks"] == blocks and [one["note"] for one in at.kv.pins().to_dict()] == ["a test"]
        assert do("pins")[0]["number"] == pin["number"]
        assert do("clear", everything=True)["blocks"] <= (len(kept) + MAX_TOKENS) // BLOCK - blocks
        timed("shrink", do, "tiers resize", "host", 48 * SLOT)
        for name in ("long", "branch", "aligned"):
            at.ask("one", name)
        assert {place[0] for place in media(do("lookup", prompt=kept, engine="one"))} == {"host"}
        assert do("unpin", pin["number"])["ok"] and not at.kv.pins()
        for name in ("branch2", "long", "aligned"):
            at.ask("two", name)
        assert media(do("lookup", prompt=kept, engine="one")) == {("disk",)}
        timed("grow", do, "tiers resize", "host", HOST)
        assert at.tier("host").capacity == HOST
        for engine in at.engines:
            at.kv.resume_child(EXAMPLE, engine=engine)


@pytest.mark.parametrize("way", WAYS)
def test_tenants(at: Operated, way: str) -> None:
    """A tenant's blocks are its own, are counted and bounded, and go when they are to go."""
    do, salt = getattr(at, way), f"alice-{way}"
    with at.quiet():
        at.kv.pause_child(EXAMPLE, engine="one")
        at.ask("one", "page", cache_salt=salt)
        blocks = at.kv.lookup(PROMPTS["page"], engine="one", cache_salt=salt).held_blocks
        assert blocks == len(PROMPTS["page"]) // BLOCK
        [mine] = [one for one in do("quota") if one["tenant"] == tag(salt)]
        assert mine["blocks"] >= blocks and mine["quota"] is None
        assert do("quota", salt, 4 * SLOT)["ok"]
        [mine] = [one for one in do("quota") if one["tenant"] == tag(salt)]
        assert mine["blocks"] <= 4 and mine["quota"] == 4 * SLOT
        at.ask("one", "aligned", cache_salt=salt)
        [mine] = [one for one in do("quota") if one["tenant"] == tag(salt)]
        assert mine["blocks"] <= 4
        again = at.ask("one", "aligned", cache_salt=salt)
        assert "over quota" in reasons(explained(at, way, again.request_id, "one"))
        assert do("quota", salt, "none")["ok"]
        at.ask("one", "page", cache_salt=salt)
        at.ask("one", "page")
        assert do("clear", tenant=salt)["blocks"] >= blocks
        assert do("lookup", prompt=PROMPTS["page"], engine="one", cache_salt=salt)["held_tokens"] == 0
        assert do("lookup", prompt=PROMPTS["page"], engine="one")["held_blocks"] == blocks
        text = "What an operator types in. " * 6 + way
        free = at.engines["one"].generate(text, MAX_TOKENS)
        at.engines["one"].wait_free_blocks(at.free["one"], 60)
        held = at.kv.lookup(text, engine="one").held_blocks
        assert held and do("clear", prefix=text, engine="one")["blocks"] == held
        assert do("lookup", prompt=PROMPTS["page"], engine="one")["held_blocks"] == blocks
        at.engines["one"].forget(60)
        assert at.engines["one"].generate(text, MAX_TOKENS).token_ids == free.token_ids
        at.engines["one"].wait_free_blocks(at.free["one"], 60)
        assert do("clear", tier="host")["ok"] and at.tier("host").used == 0
        at.kv.resume_child(EXAMPLE, engine="one")


@pytest.mark.parametrize("way", WAYS)
def test_tiers(at: Operated, way: str) -> None:
    """The disk tier is drained, removed, added and resized while both engines load from it and save into it."""
    do = getattr(at, way)
    path = at.tier("disk").path
    timed("drain disk", do, "tiers drain", "disk")
    assert at.tier("disk").draining and [tier["draining"] for tier in do("tiers list")] == [False, True]
    timed("remove disk", do, "tiers remove", "disk")
    assert at.tier("disk") is None and not os.path.exists(f"{path}/raykv.slots")
    timed("add disk", do, "tiers add", "disk", DISK // 2, path=path)
    assert at.tier("disk").capacity == DISK // 2
    timed("grow disk", do, "tiers resize", "disk", DISK)
    assert at.tier("disk").capacity == DISK
    timed("shrink host", do, "tiers resize", "host", HOST // 2)
    timed("grow host", do, "tiers resize", "host", HOST)
    done = timed("verify", do, "verify")
    assert done["ok"] and done["blocks"] >= 0 and not at.tier("host").bad_reads


def test_children(at: Operated) -> None:
    """Both engines at the same time: new hosts take most of it to start."""
    with ThreadPoolExecutor(2) as both:
        for done in [both.submit(change_children, at, *one) for one in (("api", "one"), ("command", "two"))]:
            done.result()


def change_children(at: Operated, way: str, engine: str) -> None:
    """Pause, resume, restart, add, reorder, remove, each seen in the engine's own view and in what it serves."""
    do = getattr(at, way)
    do("child pause", EXAMPLE, engine=engine)
    at.wait_child(engine, EXAMPLE, "off")
    with at.quiet(engine):
        assert EXAMPLE not in explained(at, way, at.ask(engine, "crowd3").request_id, engine)["by_source"]
    do("child resume", EXAMPLE, engine=engine)
    old = at.wait_child(engine, EXAMPLE, "up")
    with at.quiet(engine):
        at.ask(engine, "crowd3")
        assert EXAMPLE in explained(at, way, at.ask(engine, "crowd3").request_id, engine)["by_source"]
    timed("restart", do, "child restart", EXAMPLE, engine=engine)
    new = at.wait_child(engine, EXAMPLE, "up")
    eventually(lambda: at.child(engine, EXAMPLE).host_pids not in ((), old.host_pids), "new host")
    assert new.incarnation >= old.incarnation
    more = new_example(at.folder / engine / "more", "more")
    timed("add", do, "child add", more if way == "api" else as_json(more), engine=engine, before=EXAMPLE)
    at.wait_child(engine, "more", "up")
    eventually(lambda: at.chain(engine) == ["more", EXAMPLE, TIERS], "new chain")
    with at.quiet(engine):
        at.ask(engine, "crowd5")
        assert "more" in explained(at, way, at.ask(engine, "crowd5").request_id, engine)["by_source"]
    timed("reorder", do, "child reorder", TIERS, EXAMPLE, "more", engine=engine)
    eventually(lambda: at.chain(engine) == [TIERS, EXAMPLE, "more"], "new order")
    with at.quiet(engine):
        at.ask(engine, "crowd5")
        sources = explained(at, way, at.ask(engine, "crowd5").request_id, engine)["by_source"]
        assert "more" not in sources and EXAMPLE not in sources
    timed("remove", do, "child remove", "more", engine=engine)
    do("child reorder", EXAMPLE, TIERS, engine=engine)
    eventually(lambda: at.chain(engine) == [EXAMPLE, TIERS], "old chain")
    assert [child["name"] for child in do("child list", engine=engine)] == [EXAMPLE, TIERS]


def test_watch_sees_what_is_done(at: Operated) -> None:
    stop, seen = threading.Event(), []

    def look() -> None:
        for event in at.kv.watch(0.2, 120.0, stop=stop):
            seen.append((event.kind, event.what))

    watching = threading.Thread(target=look)
    watching.start()
    try:
        wanted = {("child", "off"), ("order", "done"), ("tier", "resized"), ("operation", "ended")}
        number = itertools.count()

        def all_seen() -> bool:
            at.kv.pause_child(EXAMPLE, engine="one")
            at.wait_child("one", EXAMPLE, "off")
            at.kv.resize_tier("disk", DISK // (1 + next(number) % 2 * 2))
            at.wait_child("one", EXAMPLE, "off")
            at.kv.resume_child(EXAMPLE, engine="one")
            at.wait_child("one", EXAMPLE, "up")
            return wanted <= set(seen)

        eventually(all_seen, f"{wanted} in {seen}", patience_s=90)
    finally:
        stop.set()
        watching.join()
        at.kv.resize_tier("disk", DISK)


def test_watching_in_a_shell(at: Operated) -> None:
    with ThreadPoolExecutor(1) as other:
        watching = other.submit(in_a_shell, "watch", "--json", "--every", "0.2", "--for", "12s")
        while not watching.done():  # it takes some seconds before it looks
            at.kv.pause_child(EXAMPLE, engine="one")
            at.wait_child("one", EXAMPLE, "off")
            at.kv.resume_child(EXAMPLE, engine="one")
            at.wait_child("one", EXAMPLE, "up")
    events = [json.loads(line) for line in watching.result().splitlines()]
    assert {("child", "off"), ("child", "up")} <= {(one["kind"], one["what"]) for one in events}
    assert {one["name"] for one in events if one["kind"] == "child"} == {EXAMPLE}


@pytest.mark.parametrize("way", WAYS)
def test_bad_input_changes_nothing(at: Operated, way: str) -> None:
    """One error each."""
    do = getattr(at, way)
    page = PROMPTS["page"]
    bad: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        (("explain", "no-such-request"), {}, "no-such-request"),
        (("lookup",), {"prompt": [4, 5, 10**6], "engine": "one"}, "1000000"),
        (("lookup",), {"prompt": page, "engine": "three"}, "three"),
        (("pin",), {"prompt": page, "time_limit": "-3s", "engine": "one"}, "-3s"),
        (("unpin", "pin-nobody"), {}, "pin-nobody"),
        (("prefetch",), {"prompt": page, "tier": "tape", "engine": "one"}, "tape"),
        (("clear",), {"model": "another"}, "another"),
        (("clear",), {}, "everything"),
        (("quota", "bob", "-5"), {}, "-5"),
        (("tiers resize", "host", 1), {}, "4096"),
        (("tiers resize", "host", 8192), {}, "8192"),
        (("tiers resize", "fs", "1GiB"), {}, "fs"),
        (("tiers add", "host", "1GiB"), {}, "host"),
        (("tiers add", "fs", "1GiB"), {}, "path"),
        (("child pause", "nobody"), {"engine": "one"}, "nobody"),
        (("child reorder", EXAMPLE), {"engine": "one"}, TIERS),
        (("child add", "{}" if way == "command" else {}), {"engine": "one"}, "kv_connector"),
    ]
    eventually(lambda: at.chain("one") == [EXAMPLE, TIERS], "chain")
    before = state(at)
    for arguments, options, part in bad:
        with pytest.raises((RayKVError, CommandFailed)) as raised:
            do(*arguments, **options)
        assert part in str(raised.value), f"{arguments}: {raised.value}"
        assert "Traceback" not in str(raised.value)
    assert state(at) == before


@pytest.mark.parametrize("way", WAYS)
def test_a_node_is_drained(at: Operated, way: str, tmp_path: Path) -> None:
    """No Controller runs here, so its engines stay: its store saves nothing more, and what it has goes to a folder."""
    do, node = getattr(at, way), at.kv.nodes[0].short
    with at.quiet():
        for engine in at.engines:
            at.kv.pause_child(EXAMPLE, engine=engine)
        at.kv.clear(everything=True)
        at.ask("one", "page")
        with pytest.raises((RayKVError, CommandFailed), match="neither an fs tier nor a peer tier"):
            do("drain_node" if way == "api" else "drain", node)
        kept = at.ask("two", "page")
        assert explained(at, way, kept.request_id, "two")["by_source"]["host"] == whole("page"), "it loads all the same"
        at.ask("one", "aligned")
        assert at.kv.store(at.store_name).drain and not at.kv.lookup(PROMPTS["aligned"], engine="one").held_tokens
        assert do("undrain_node", node)["ok"] if way == "api" else do("drain", node, undo=True)["ok"]
        assert not at.kv.store(at.store_name).drain
        at.ask("one", "aligned")
        assert at.kv.lookup(PROMPTS["aligned"], engine="one").held_tokens == len(PROMPTS["aligned"])
        assert at.kv.add_tier("fs", DISK, path=str(tmp_path)).ok
        assert timed("drain a node", do, "drain_node" if way == "api" else "drain", node)["ok"]
        blocks = sum(len(PROMPTS[name]) // BLOCK for name in ("page", "aligned"))
        assert sum(path.is_file() for path in tmp_path.rglob("*")) >= blocks
        for medium in ("host", "disk"):
            at.kv.clear(tier=medium)
        found = at.ask("two", "page")
        assert explained(at, way, found.request_id, "two")["by_source"]["fs"] == whole("page")
        assert do("undrain_node", node)["ok"] if way == "api" else do("drain", node, undo=True)["ok"]
        assert at.kv.remove_tier("fs").ok and at.tier("fs") is None
        for engine in at.engines:
            at.kv.resume_child(EXAMPLE, engine=engine)
            at.wait_child(engine, EXAMPLE, "up")


# -- live changes -----------------------------------------------------------------------------------------------------


def change_live(at: Operated, number: int, seed: int, for_s: float = math.inf) -> None:
    """So many random changes, or as many as there is time for. The load compares its answers all the while."""
    changes, before = Changes(at, seed), at.check_load()
    deadline, done = time.monotonic() + for_s, 0
    try:
        while done < number and time.monotonic() < deadline:
            changes.one()
            at.check_load()
            done += 1
    finally:
        changes.undo()
    at.check_integrity()
    with at.quiet():
        for engine in at.engines:
            at.ask(engine, "long")
    for kind, took in sorted(changes.took.items()):
        middle = sorted(took)[len(took) // 2]
        print(f"{kind}: {len(took)}, median {middle:.2f} s, longest {max(took):.2f} s", file=sys.stderr)
    print(f"{done} changes, {at.check_load() - before} requests meanwhile", file=sys.stderr)


def test_live_changes(at: Operated) -> None:
    change_live(at, 8, seed=48)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_200_live_changes(at: Operated) -> None:
    seed, for_s = int(os.environ.get("RAYKV_SEED", "200")), float(os.environ.get("RAYKV_CHANGES_S", "inf"))
    change_live(at, 200, seed, for_s)


# -- what is killed comes back ----------------------------------------------------------------------------------------


def test_a_desk_is_killed(at: Operated) -> None:
    """It comes back, and knows the stories that its engine has told before."""
    with at.quiet("two"):
        request = at.ask("two", "crowd1").request_id
        explained(at, "api", request, "two")
    pid = desk_pid(at, "two")
    os.kill(pid, signal.SIGKILL)
    timed("desk back", eventually, lambda: desk_pid(at, "two") not in (0, pid), "desk", 90)
    eventually(lambda: any(engine.id == "two" for engine in at.kv.engines), "view of the engine at its new desk")
    eventually(lambda: any(one.startswith(request) for one in at.kv.requests(engine="two")), "story at the new desk")
    assert explained(at, "api", request, "two")["request"].startswith(request)
    assert at.kv.pause_child(EXAMPLE, engine="two").ok and at.kv.resume_child(EXAMPLE, engine="two").ok


def test_the_store_is_killed_in_a_tier_operation(at: Operated) -> None:
    """Ray restarts it, it finds its content again, the operation can be given anew, and no answer was wrong."""
    for number in range(2):
        errors: list[str] = []
        pid = at.kv.store(at.store_name).pid
        operation = threading.Thread(target=attempt, args=(errors, at.kv.drain_tier, "host"))
        operation.start()
        time.sleep(0.02 * number)
        os.kill(pid, signal.SIGKILL)
        operation.join()
        timed("store back", eventually, lambda pid=pid: store_pid(at) not in (0, pid), "store", 90)
        assert all("Traceback" not in error for error in errors)
        if at.tier("host") is None or at.tier("host").draining:
            eventually(lambda: attempt([], at.kv.add_tier, "host", HOST), "host tier again", 60)
        eventually(lambda: attempt([], at.kv.drain_tier, "disk"), "drain of the disk tier", 60)
        path = at.tier("disk").path
        assert at.kv.add_tier("disk", DISK, path=path).ok
    with at.quiet():
        at.ask("one", "long")
        at.ask("two", "long")
