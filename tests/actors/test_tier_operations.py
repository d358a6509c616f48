"""A running store's tiers change: each operation, amid saves and loads of which every byte is compared, over kills."""

from __future__ import annotations

import dataclasses
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from raykv.actors import store_files, store_handle
from raykv.actors.node_store import NodeStore
from raykv.actors.tier_state import TierState, TierStateFile
from raykv.admin_messages import Operation, OperationKind, OperationState
from raykv.errors import StoreError
from raykv.store_messages import Cascade, LookedUp, Medium, Settle, StoreSpec, TierSpec
from raykv.types import LeaseId
from tests.actors.test_node_store import SLOT, E, Harness
from tests.support.forked_store import ForkedStore
from tests.support.kv_rank import KVRank, load_job, look_up, save_job
from tests.support.waiting import eventually

pytestmark = pytest.mark.process

PATIENCE = 30.0
HOST, DISK, FS = Medium.HOST, Medium.DISK, Medium.FS
NUMBERS = itertools.count()


@pytest.fixture
def h(tmp_path: Path) -> Iterator[Harness]:
    harness = Harness(tmp_path)
    yield harness
    harness.close()
    assert not [path for path in tmp_path.iterdir() if path.suffix in (".host", ".tiers", ".tiers-new")]


def tier(medium: Medium, slots: int = 0, path: Path | str | None = None) -> TierSpec:
    return TierSpec(medium, slots * SLOT, str(path) if path is not None else None)


def order(kind: OperationKind, spec: TierSpec, after: Medium | None = None) -> Operation:
    return Operation(f"op {next(NUMBERS)}", kind, tier=spec, after=after)


def ended(store: Any, operation: Operation) -> OperationState:
    deadline = time.monotonic() + PATIENCE
    while (state := store.operation(operation.number)).running:
        assert time.monotonic() < deadline, f"{operation} runs for ever: {state}"
        time.sleep(0.005)
    return state


def do(store: NodeStore, kind: OperationKind, spec: TierSpec, after: Medium | None = None) -> OperationState:
    """Carry it out; it must go well."""
    operation = order(kind, spec, after)
    store.begin(operation)
    state = ended(store, operation)
    assert not state.error, state
    store.check_integrity()
    return state


def add(store: NodeStore, *spec: Any) -> OperationState:
    return do(store, OperationKind.ADD_TIER, tier(*spec))


def resize(store: NodeStore, medium: Medium, slots: int) -> OperationState:
    return do(store, OperationKind.RESIZE_TIER, tier(medium, slots))


def drain(store: NodeStore, medium: Medium) -> OperationState:
    return do(store, OperationKind.DRAIN_TIER, tier(medium))


def remove(store: NodeStore, medium: Medium) -> OperationState:
    return do(store, OperationKind.REMOVE_TIER, tier(medium))


def tiers(store: NodeStore) -> list[tuple[Medium, int, int]]:
    return [(one.medium, one.slots, one.used) for one in store.status().tiers]


def release(store: NodeStore, found: LookedUp) -> None:
    if found.lease is not None:
        store.settle(E, Settle(releases=(found.lease,)))


def has(h: Harness, store: NodeStore, rank: KVRank, prompt: str, count: int) -> tuple[Medium, ...]:
    """Where the prompt's blocks, saved from block ids 0, 1, ..., lie; each byte is compared."""
    before = rank.blocks(range(count))
    found = store.look_up(E, look_up(prompt, count))
    if found.num_blocks:
        target = list(range(12, 12 + found.num_blocks))
        rank.wipe(target)
        assert h.get(store, rank, found, target).ok
        assert rank.blocks(target) == before[: found.num_blocks]
    release(store, found)
    return found.media


# -- each operation -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("medium", [HOST, DISK])
def test_a_tier_grows_and_shrinks_with_what_it_has(h: Harness, medium: Medium) -> None:
    store = h.store(h.spec(8 if medium is HOST else 0, 8 if medium is DISK else 0))
    rank = h.rank(store)
    h.put(store, rank, "p", range(8))
    assert resize(store, medium, 20).result == f"The {medium} tier has 20 slots now, 8 before."
    assert tiers(store) == [(medium, 20, 8)]
    h.put(store, rank, "q", range(10))
    assert has(h, store, rank, "p", 8) == (medium,) * 8 and has(h, store, rank, "q", 10) == (medium,) * 10
    store.clear()
    h.put(store, rank, "r", range(6))
    state = resize(store, medium, 7)
    assert (state.done, state.total) == (state.total, state.done)
    assert has(h, store, rank, "r", 6) == (medium,) * 6, "what was beyond the end has moved to free slots"
    assert "1 blocks found no room" in resize(store, medium, 5).result
    assert tiers(store) == [(medium, 5, 5)]


def test_what_a_smaller_host_tier_has_no_room_for_goes_to_the_disk(h: Harness) -> None:
    store = h.store(h.spec(8, 16))
    rank = h.rank(store)
    h.put(store, rank, "p", range(8))
    resize(store, HOST, 3)
    assert tiers(store)[0][:2] == (HOST, 3)
    media = has(h, store, rank, "p", 8)
    assert len(media) == 8 and media.count(HOST) in (2, 3), "one slot may be kept free"


def test_a_disk_tier_is_added_and_takes_what_the_host_tier_has(h: Harness, tmp_path: Path) -> None:
    store = h.store(h.spec(4, cascade=Cascade.WRITE))
    rank = h.rank(store)
    h.put(store, rank, "p", range(4))
    assert "0 of them with blocks from before" in add(store, DISK, 16, tmp_path / "new").result
    eventually(lambda: tiers(store) == [(HOST, 4, 4), (DISK, 16, 4)])
    h.put(store, rank, "q", range(4))
    assert has(h, store, rank, "p", 4) == (DISK,) * 4


def test_content_of_before_is_found_in_a_tier_that_is_added(h: Harness, tmp_path: Path) -> None:
    other = h.store(dataclasses.replace(h.spec(0, 16), name="other"))
    rank = h.rank(other)
    h.put(other, rank, "p", range(4))
    other.shutdown(remove_host=True)
    slots = tmp_path / "disk" / "raykv.slots"
    raw = bytearray(slots.read_bytes())
    raw[3 * SLOT] ^= 1
    slots.write_bytes(raw)
    store = h.store()
    store.attach(rank.attach)
    assert "4 of them with blocks from before" in add(store, DISK, 16, tmp_path / "disk").result
    found = store.look_up(E, look_up("p", 4))
    done = h.get(store, rank, found, [20, 21, 22, 23])
    assert (done.ok, done.bad_blocks) == (False, (23,)), "the one that has rotted is a miss"
    release(store, found)
    assert has(h, store, rank, "p", 4) == (DISK,) * 3


def test_a_host_tier_is_added_in_front_and_removed_again(h: Harness) -> None:
    store = h.store(h.spec(0, 16))
    rank = h.rank(store)
    h.put(store, rank, "p", range(4))
    add(store, HOST, 8)
    h.put(store, rank, "q", range(4))
    assert tiers(store) == [(HOST, 8, 4), (DISK, 16, 4)]
    assert has(h, store, rank, "p", 4) == (DISK,) * 4
    assert has(h, store, rank, "p", 4) == (DISK,) * 4  # the second read brings them up
    assert has(h, store, rank, "p", 4) == (HOST,) * 4
    host = store._host
    assert host.exists()
    assert "blocks lie elsewhere." in remove(store, HOST).result
    assert tiers(store) == [(DISK, 16, 8)] and not host.exists()
    assert has(h, store, rank, "p", 4) == has(h, store, rank, "q", 4) == (DISK,) * 4
    add(store, HOST, 4)
    h.put(store, rank, "r", range(4))
    assert tiers(store)[0] == (HOST, 4, 4)


def test_a_drained_tier_is_read_and_takes_nothing(h: Harness, tmp_path: Path) -> None:
    store = h.store(h.spec(4, 16))
    rank = h.rank(store)
    h.put(store, rank, "p", range(4))
    assert "blocks lie elsewhere." in drain(store, HOST).result
    assert store.status().tiers[0].draining
    h.put(store, rank, "q", range(4))
    assert tiers(store) == [(HOST, 4, 0), (DISK, 16, 8)]
    assert "0 blocks lie elsewhere" in drain(store, HOST).result
    with pytest.raises(StoreError, match="is drained and can't be resized"):
        store.begin(order(OperationKind.RESIZE_TIER, tier(HOST, 8)))
    assert "takes blocks again" in add(store, HOST, 4).result
    h.put(store, rank, "r", range(4))
    assert tiers(store)[0] == (HOST, 4, 4) and not store.status().tiers[0].draining


def test_a_drained_tier_is_added_again_by_the_size_that_is_shown(h: Harness) -> None:
    """A resize may be to any number of bytes; what is shown of a tier is its slots."""
    store = h.store(h.spec(8, 16))
    h.rank(store)
    do(store, OperationKind.RESIZE_TIER, TierSpec(HOST, 4 * SLOT + 100))
    drain(store, HOST)
    assert "takes blocks again" in add(store, HOST, store.status().tiers[0].slots).result


def test_what_finds_no_room_is_left_and_read_and_goes_with_its_tier(h: Harness, tmp_path: Path) -> None:
    store = h.store(h.spec(2, 16))
    rank = h.rank(store)
    add_first = [h.put(store, rank, "p", range(6))]
    assert add_first[0].skipped == 4
    h.put(store, rank, "p", range(6))
    eventually(lambda: store.status().tiers[1].used >= 1)
    for name in "qr":
        h.put(store, rank, name, range(2))
    eventually(lambda: store.status().tiers[1].used >= 2)
    used = store.status().tiers[1].used
    state = drain(store, DISK)
    left = store.status().tiers[1].used
    assert (f"{left} find no room" in state.result) == (left > 0) and left <= used
    pool = [tmp_path / "disk" / "raykv.slots", tmp_path / "disk" / "raykv.headers"]
    assert all(path.exists() for path in pool)
    remove(store, DISK)
    assert [one[0] for one in tiers(store)] == [HOST] and not any(path.exists() for path in pool)


def test_an_fs_tier_comes_takes_and_goes_and_its_files_stay(h: Harness, tmp_path: Path) -> None:
    store = h.store(h.spec(4, cascade=Cascade.WRITE))
    rank = h.rank(store)
    h.put(store, rank, "p", range(4))
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o700)
    add(store, FS, 64, shared)
    eventually(lambda: store.status().tiers[1].used == 4)
    h.put(store, rank, "q", range(4))
    assert has(h, store, rank, "p", 4) == (FS,) * 4
    assert "keeps to" in resize(store, FS, 128).result
    assert "its files stay" in drain(store, FS).result
    assert has(h, store, rank, "p", 4) == (FS,) * 4
    remove(store, FS)
    assert [one[0] for one in tiers(store)] == [HOST] and list(shared.rglob("*"))
    assert has(h, store, rank, "p", 4) == ()
    add(store, FS, 64, shared)
    eventually(lambda: has(h, store, rank, "p", 4) == (FS,) * 4)


def test_leased_blocks_are_waited_for(h: Harness) -> None:
    store = h.store(h.spec(4, 16))
    rank = h.rank(store)
    h.put(store, rank, "p", range(4))
    found = store.look_up(E, look_up("p", 4))
    operation = order(OperationKind.REMOVE_TIER, tier(HOST))
    store.begin(operation)
    eventually(lambda: store.status().tiers[-1].used == 4)
    before = rank.blocks(range(4))
    assert store.operation(operation.number).running
    assert h.get(store, rank, found, [12, 13, 14, 15]).ok and rank.blocks([12, 13, 14, 15]) == before
    assert store.operation(operation.number).running
    release(store, found)
    assert not ended(store, operation).error
    assert tiers(store) == [(DISK, 16, 4)]


def test_a_number_is_one_operation(h: Harness, tmp_path: Path) -> None:
    store = h.store()
    h.rank(store)
    operation = order(OperationKind.ADD_TIER, tier(DISK, 8, tmp_path / "d"))
    store.begin(operation)
    first = ended(store, operation)
    assert store.begin(operation) == first, "and not: there is a disk tier already"
    assert [one[0] for one in tiers(store)] == [HOST, DISK]


# -- refusals -----------------------------------------------------------------------------------------------

ADD, RESIZE, DRAIN, REMOVE = (
    OperationKind.ADD_TIER,
    OperationKind.RESIZE_TIER,
    OperationKind.DRAIN_TIER,
    OperationKind.REMOVE_TIER,
)


@pytest.mark.parametrize(
    ("kind", "spec", "after", "why"),
    [
        (ADD, None, None, "a TierSpec with its medium is missing"),
        (ADD, tier(HOST, 4), None, "has a host tier already"),
        (ADD, tier(DISK, 4), None, "needs an absolute path"),
        (ADD, tier(DISK, 4, "relative"), None, "needs an absolute path, not 'relative'"),
        (ADD, tier(DISK, 0, "/tmp/x"), None, "has no room for one block"),
        (ADD, TierSpec(DISK, -1, "/tmp/x"), None, "has no room for one block"),
        (ADD, tier(DISK, 4, "/tmp/x"), FS, "disk goes behind host here"),
        (ADD, TierSpec(DISK, 1 << 60, "/tmp/x"), None, "are free there: give it a smaller capacity"),
        (ADD, tier(Medium.PEER), None, "start the store anew"),
        (RESIZE, tier(DISK, 4), None, "has no disk tier: it has host"),
        (RESIZE, tier(HOST, 0), None, "has no room for one block"),
        (RESIZE, TierSpec(HOST, 1 << 60), None, "can grow to|are free there"),
        (RESIZE, tier(HOST, 4, "/elsewhere"), None, "leave the path out"),
        (DRAIN, tier(HOST), None, "is the last one .* can't be drained"),
        (REMOVE, tier(HOST), None, "is the last one .* can't be removed"),
        (REMOVE, tier(FS), None, "has no fs tier"),
    ],
)
def test_what_can_not_be_is_refused_and_changes_nothing(
    h: Harness, kind: OperationKind, spec: Any, after: Any, why: str
) -> None:
    store = h.store()
    h.rank(store)
    before = tiers(store)
    with pytest.raises(StoreError, match=why):
        store.begin(Operation("n", kind, tier=spec, after=after))
    assert tiers(store) == before and store.operations() == ()


def test_without_an_engine_there_is_nothing_to_change(h: Harness) -> None:
    store = h.store()
    with pytest.raises(StoreError, match="no engine has joined"):
        store.begin(order(RESIZE, tier(HOST, 8)))


# -- restarts -----------------------------------------------------------------------------------------------


def test_a_store_comes_back_with_the_tiers_that_an_operator_left(h: Harness, tmp_path: Path) -> None:
    spec = h.spec(4)
    store = h.store(spec)
    rank = h.rank(store)
    resize(store, HOST, 8)
    add(store, DISK, 16, tmp_path / "d")
    h.put(store, rank, "p", range(8))
    drain(store, DISK)
    store.shutdown(remove_host=False)
    again = h.store(spec)
    again.attach(rank.attach)
    assert tiers(again) == [(HOST, 8, 8), (DISK, 16, 0)]
    assert [one.draining for one in again.status().tiers] == [False, True]
    assert has(h, again, rank, "p", 8) == (HOST,) * 8
    info = again.info()["spec"]
    assert info["tiers"] == [("host", 4 * SLOT, None)]
    now = StoreSpec("test", (TierSpec(HOST, 8 * SLOT), TierSpec(DISK, 16 * SLOT, str(tmp_path / "d"))))
    for wanted, fits in ((spec, True), (now, True), (h.spec(5), False)):
        assert (store_handle._conflict(wanted, info) == "") == fits
    again.shutdown(remove_host=True)
    fresh = h.store(spec)
    fresh.attach(rank.attach)
    assert tiers(fresh) == [(HOST, 4, 0)], "after the end for good, as configured"


@pytest.mark.parametrize("damage", ["flip", "version", "config", "empty", "unreadable"])
def test_a_state_that_can_not_be_trusted_is_not(
    h: Harness, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    spec = h.spec(4)
    store = h.store(spec)
    rank = h.rank(store)
    resize(store, HOST, 8)
    h.put(store, rank, "p", range(4))
    store.shutdown(remove_host=False)
    path = store._host.with_suffix(".tiers")
    assert path.stat().st_mode & 0o777 == 0o600
    raw = path.read_bytes()
    if damage == "flip":
        path.write_bytes(raw.replace(b"host", b"hose", 1))
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "unreadable":
        path.write_bytes(b"\xff" * 100)
    elif damage == "version":
        path.write_bytes(raw.replace(b'"version": 1', b'"version": 9'))
    else:
        spec = h.spec(5)
    again = h.store(spec)
    again.attach(rank.attach)
    assert tiers(again)[0][1] == (5 if damage == "config" else 4)
    assert "as configured" in caplog.text
    assert has(h, again, rank, "p", 4) == (HOST,) * 4, "a pool of another length keeps what fits"


def test_what_a_store_noted_is_removed_with_what_it_left(tmp_path: Path) -> None:
    host = store_files.host_path("test", "gone", tmp_path)
    file = TierStateFile(host, StoreSpec("gone", (TierSpec(HOST, SLOT),)))
    file.write(TierState((TierSpec(HOST, 2 * SLOT),)))
    assert store_files.remove_stale(tmp_path) == [], "while its store lives"
    file.close(remove=False)
    assert store_files.remove_stale(tmp_path) == [host.with_suffix(".tiers").name]


# -- under load ---------------------------------------------------------------------------------------------


class Load:
    """An engine's threads: each saves prompts of its own and loads them again, and compares every byte."""

    def __init__(self, h: Harness, store: NodeStore, threads: int = 3) -> None:
        self.store, self.rank = store, h.rank(store, blocks=24 * threads)
        self.before = self.rank.blocks(range(24 * threads))
        self.stop, self.errors = threading.Event(), list[str]()
        self.loaded = self.saved = self.missed = 0
        self._jobs = itertools.count(1)
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(threads)]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        dice, known = random.Random(number), dict[str, list[int]]()
        try:
            while not self.stop.is_set():
                self._step(dice, number, known)
        except Exception as error:
            self.errors.append(f"{type(error).__name__}: {error}")

    def _step(self, dice: random.Random, number: int, known: dict[str, list[int]]) -> None:
        store, attach = self.store, self.rank.attach
        name = f"{number}.{dice.randrange(12)}"
        if name not in known or dice.random() < 0.3:
            blocks = known.setdefault(name, [24 * number + dice.randrange(12) for _ in range(dice.randint(1, 6))])
            job = save_job(next(self._jobs), name, blocks)
            _, (done,) = store.save(store.life, attach.engine, attach.rank, [job])
            settle = Settle(commits=(job.job,)) if done.ok and dice.random() < 0.9 else Settle(aborts=(job.job,))
            store.settle(E, settle)
            self.saved += done.ok
            return
        blocks = known[name]
        found = store.look_up(E, look_up(name, len(blocks), request=f"{number}"))
        if found.lease is None:
            self.missed += 1
            return
        target = [24 * number + 12 + i for i in range(found.num_blocks)]
        job = load_job(next(self._jobs), found.lease, target)
        _, (done,) = store.load(store.life, attach.engine, attach.rank, [job])
        got = self.rank.blocks(target)
        for at, (block, data) in enumerate(zip(blocks, got, strict=False)):
            if target[at] not in done.bad_blocks and data != self.before[block]:
                self.errors.append(f"block {at} of {name} has wrong bytes from {found.media[at]}")
        if not done.ok:
            self.errors.append(f"a load failed: {done.error}")
        self.loaded += found.num_blocks
        store.settle(E, Settle(releases=(found.lease or LeaseId(0),)))

    def end(self) -> None:
        self.stop.set()
        for thread in self._threads:
            thread.join(PATIENCE)
        assert not self.errors, self.errors[:3]


def a_change(dice: random.Random, store: NodeStore, folder: Path) -> Operation:
    there = {one.medium: one for one in store.status().tiers}
    path = {HOST: None, DISK: folder / "disk", FS: folder / "shared"}
    medium = dice.choice([HOST, DISK, DISK, FS])
    slots = dice.randint(6, 40)
    if medium not in there:
        return order(ADD, tier(medium, slots if medium is not FS else 400, path[medium]))
    if there[medium].draining:
        spec = next(one for one in store._tiers_now if one.medium is medium)
        return order(dice.choice([ADD, REMOVE]), spec)
    return order(
        dice.choice([RESIZE, RESIZE, DRAIN, REMOVE]),
        tier(medium, slots if medium is not FS else dice.randint(300, 500)),
    )


@pytest.mark.parametrize("cascade", Cascade)
def test_tiers_change_at_random_under_load_and_every_byte_is_right(
    h: Harness, tmp_path: Path, cascade: Cascade
) -> None:
    (tmp_path / "shared").mkdir(mode=0o700)
    store = h.store(h.spec(16, 24, cascade=cascade, lease_s=5.0))
    load, dice = Load(h, store), random.Random(str(cascade))
    kinds = set()
    try:
        refused = done = 0
        while done < 40:
            operation = a_change(dice, store, tmp_path)
            try:
                store.begin(operation)
            except StoreError as error:
                assert "the last one" in str(error), error
                refused += 1
                continue
            state = ended(store, operation)
            assert not state.error, state
            store.check_integrity()
            kinds.add((operation.kind, operation.tier.medium if operation.tier else None))
            done += 1
    finally:
        load.end()
    assert load.loaded and load.saved and len(kinds) > 6, (load.loaded, load.saved, kinds)
    store.settle(E, Settle())
    eventually(lambda: not any(one.writing for one in store.status().tiers))  # a move may still be under way
    assert all((one.quarantined, one.bad_reads) == (0, 0) for one in store.status().tiers)


# -- kill -9 ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("medium", [HOST, DISK])
def test_a_kill_in_the_middle_of_a_change_leaves_a_store_with_right_bytes(tmp_path: Path, medium: Medium) -> None:
    shm = tmp_path / "shm"
    shm.mkdir()
    disk = TierSpec(DISK, 24 * SLOT, str(tmp_path / "disk"))
    spec = StoreSpec("test", (TierSpec(HOST, 24 * SLOT), disk), slot_nbytes=SLOT, cascade=Cascade.WRITE)
    process, rank, dice = ForkedStore(spec, shm), KVRank(), random.Random(str(medium))
    before = rank.blocks(range(24))
    jobs = itertools.count(1)

    def call(method: str, *args: Any) -> Any:
        return process.call(method, *args, timeout=PATIENCE)

    try:
        lives = 0
        for turn in range(8):
            process()
            attached = call("attach", rank.attach)
            lives += 1
            call("check_integrity")
            for name in range(6):
                prompt, blocks = f"p{name}", [name * 2, name * 2 + 1]
                found = call("look_up", E, look_up(prompt, 2))
                if found.lease is not None:
                    target = [20, 21][: found.num_blocks]
                    _, (done,) = call(
                        "load", attached.store, E, rank.attach.rank, [load_job(next(jobs), found.lease, target)]
                    )
                    assert done.ok, done
                    assert rank.blocks(target) == before[name * 2 : name * 2 + found.num_blocks]
                    call("settle", E, Settle(releases=(found.lease,)))
                job = save_job(next(jobs), prompt, blocks)
                _, (done,) = call("save", attached.store, E, rank.attach.rank, [job])
                call("settle", E, Settle(commits=(job.job,)))
            sizes = [dice.randint(2, 400) for _ in range(dice.randint(1, 4))]
            kinds = [(RESIZE, tier(medium, slots)) for slots in sizes]
            if turn % 4 == 3:
                kinds = [(REMOVE, tier(medium)), (ADD, tier(medium, 24, tmp_path / "disk" if medium is DISK else None))]
            threads = [threading.Thread(target=_order_all, args=(call, kinds))]
            threads[0].start()
            time.sleep(dice.random() * 0.1)
            process.kill()
            threads[0].join(PATIENCE)
            eventually(lambda: process._connection is None)  # else the next call may go to the dead one
        assert lives == 8
    finally:
        process.close()
        rank.close()
        store_files.remove_stale(shm)
    assert list(shm.glob("*.host")) == [] and list(shm.glob("*.tiers*")) == []


def _order_all(call: Callable[..., Any], kinds: list[tuple[OperationKind, TierSpec]]) -> None:
    """Until the store is dead."""
    for kind, spec in kinds:
        operation = order(kind, spec)
        try:
            state = call("begin", operation)
            while state.running:
                state = call("operation", operation.number)
        except Exception:
            return
