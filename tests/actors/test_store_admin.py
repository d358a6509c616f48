"""What operators see of a store's content and do to it, over real memory and files."""

from __future__ import annotations

import dataclasses
import json
import random
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raykv.actors.node_store import NodeStore
from raykv.actors.store_handle import GROUP_OF, GROUPS
from raykv.admin_messages import Operation, OperationKind, OperationState, Selection, tenant_tag
from raykv.core.operations import RUNNING
from raykv.engine_messages import Why
from raykv.errors import StoreError
from raykv.store_messages import Cascade, Medium, SaveJob, Settle, TierSpec
from raykv.types import JobId
from tests.actors.test_node_store import SLOT, Harness
from tests.support.kv_rank import E, KVRank, digest, hashes, look_up, save_job
from tests.support.waiting import eventually

pytestmark = pytest.mark.process

A, B = tenant_tag("a"), tenant_tag("b")


@pytest.fixture
def h(tmp_path: Path) -> Iterator[Harness]:
    harness = Harness(tmp_path)
    yield harness
    harness.close()


def put_as(h: Harness, store: NodeStore, rank: KVRank, prompt: str, block_ids: list[int], *tags: bytes) -> int:
    """Save a prompt's blocks for tenants, half and half where there are two; how many were skipped."""
    h.jobs += 1
    share = len(block_ids) // len(tags)
    job = dataclasses.replace(save_job(h.jobs, prompt, block_ids), tenants=(tuple((tag, share) for tag in tags),))
    _, (done,) = store.save(store.life, rank.attach.engine, rank.attach.rank, [job])
    assert done.ok, done.error
    store.settle(rank.attach.engine, Settle(commits=(job.job,)))
    return done.skipped


def prompt_of(prompt: str, count: int) -> bytes:
    return b"".join(hashes(prompt, count))


def finished(store: NodeStore, number: str) -> OperationState:
    eventually(lambda: not store.operation(number).running)
    return store.operation(number)


def with_facts(rank: KVRank, **facts: Any) -> KVRank:
    rank.attach = dataclasses.replace(rank.attach, facts=json.dumps(facts), model="a model")
    return rank


# -- what is here, and why not ------------------------------------------------------------------------------


def test_a_store_without_an_engine_answers(h: Harness) -> None:
    store = h.store()
    view = store.view()
    assert (view.models, view.tenants, view.pins, view.operations) == ((), (), (), ())
    assert store.where(("00" * 16,), prompt_of("p", 2))[0].parts == 0
    assert [one.why for one in store.why(("00" * 16,), prompt_of("p", 2)) if one] == [Why.NEVER_STORED] * 2
    for call in (
        lambda: store.pin("1", Selection(), 5.0, ""),
        lambda: store.unpin("1"),
        lambda: store.forget(Selection()),
        lambda: store.set_quota(A.hex(), 5),
        lambda: store.begin(Operation("1", OperationKind.VERIFY)),
    ):
        with pytest.raises(StoreError, match="no engine has joined"):
            call()


def test_what_is_held_is_seen_by_model_and_tenant_and_place(h: Harness) -> None:
    store = h.store(h.spec(16, 16, cascade=Cascade.WRITE))
    rank = with_facts(h.rank(None), size="7B")
    store.attach(rank.attach)
    assert put_as(h, store, rank, "p", [0, 1, 2, 3], A, B) == 0
    name = rank.attach.fingerprint.hex()
    eventually(lambda: store.where((name,), prompt_of("p", 4))[3].media == (Medium.HOST, Medium.DISK))
    places = store.where((name,), prompt_of("p", 5))
    assert [(one.parts, one.of, one.nbytes) for one in places] == [(1, 1, 2 * SLOT)] * 4 + [(0, 1, 0)]
    view = store.view()
    (model,) = view.models
    assert (model.fingerprint, model.model, model.engines) == (name, "a model", (str(E),))
    assert (model.blocks, model.nbytes, json.loads(model.facts)) == (8, 8 * SLOT, {"size": "7B"})
    assert {one.tag: (one.blocks, one.nbytes, one.quota) for one in view.tenants} == {
        A.hex(): (4, 4 * SLOT, None),
        B.hex(): (4, 4 * SLOT, None),
    }


def test_why_a_block_is_not_here(h: Harness) -> None:
    store = h.store(h.spec(4))
    rank, other = (
        with_facts(h.rank(None), dtype="fp16", size=1),
        with_facts(h.rank(None, model="m2"), dtype="fp8", size=1),
    )
    other.attach = dataclasses.replace(other.attach, engine=type(E)("other"))
    store.attach(rank.attach)
    store.attach(other.attach)
    mine = (rank.attach.fingerprint.hex(),)

    def why(prompt: str) -> Any:
        return store.why(mine, prompt_of(prompt, 1))[0]

    assert why("p").why == Why.NEVER_STORED and why("p").at == 0
    begun = time.time()
    h.put(store, rank, "p", [0])
    assert why("p") is None
    for number in range(4):
        h.put(store, rank, f"q{number}", [number])
    gone = why("p")
    assert gone.why == Why.EVICTED and begun <= gone.at <= time.time()
    store.forget(Selection(hashes=prompt_of("q3", 1)))
    assert why("q3").why == Why.CLEARED
    h.put(store, other, "r", [0])
    assert why("r").why == Why.OTHER_FINGERPRINT and "dtype: fp16 here, fp8 there" in why("r").detail
    assert store.why((other.attach.fingerprint.hex(),), prompt_of("r", 1)) == (None,)
    h.put(store, rank, "r", [1])
    (missed_then,) = store.why(mine, prompt_of("r", 1), time.time())
    assert why("r") is None and missed_then is not None and missed_then.why == Why.OTHER_FINGERPRINT
    assert store.why(mine, prompt_of("r", 1), begun - 60) == (None,)  # the other model's had not come either
    found = store.look_up(E, look_up("q2", 1))
    store.look_up(E, look_up("q1", 1, "s"))
    assert found.num_blocks == 1
    rank.wipe(range(24))
    slots = store._stock.tiers.rows(0)  # type: ignore[union-attr]
    assert slots is not None
    slots[:] ^= 1
    h.get(store, rank, found, [5])
    assert why("q2").why == Why.CORRUPT


def test_why_a_block_was_not_here_then(h: Harness) -> None:
    """Who missed a block has most often stored it since, so what is asked is how things were when he looked."""
    store = h.store(h.spec(4))
    rank = h.rank(store)
    mine, p = (rank.attach.fingerprint.hex(),), prompt_of("p", 1)
    h.put(store, rank, "p", [0])
    assert store.why(mine, p, time.time()) == (None,)  # nothing older is remembered
    store.forget(Selection(hashes=p))
    cleared = time.time()
    h.put(store, rank, "p", [0])
    assert store.why(mine, p) == (None,)
    assert [one and one.why for one in store.why(mine, p, cleared)] == [Why.CLEARED]
    store.forget(Selection(hashes=p))
    [since] = store.why(mine, p, cleared)
    assert since is not None and since.why == Why.NOT_FOUND and "has left since" in since.detail
    assert [one and one.why for one in store.why(mine, p, time.time())] == [Why.CLEARED]


def test_no_room_and_over_quota_are_told_apart(h: Harness) -> None:
    store = h.store(h.spec(4))
    rank = h.rank(store)
    mine = (rank.attach.fingerprint.hex(),)
    h.put(store, rank, "p", [0, 1, 2, 3])
    assert store.look_up(E, look_up("p", 4)).num_blocks == 4  # a lease: nothing may go
    assert h.put(store, rank, "q", [4]).skipped == 1
    assert [one and one.why for one in store.why(mine, prompt_of("q", 1))] == [Why.NO_ROOM]
    assert store.set_quota(A.hex(), 0).blocks == 0
    assert put_as(h, store, rank, "r", [5], A) == 1
    assert [one and one.why for one in store.why(mine, prompt_of("r", 1))] == [Why.OVER_QUOTA]
    assert [(one.quota, one.refused_blocks) for one in store.view().tenants] == [(0, 1)]


# -- pins ---------------------------------------------------------------------------------------------------


def test_a_pin_keeps_blocks_over_a_restart_and_until_its_time(h: Harness) -> None:
    spec = h.spec(8)
    store = h.store(spec)
    rank = h.rank(store)
    h.put(store, rank, "p", [0, 1, 2])
    done = store.pin("one", Selection(hashes=prompt_of("p", 9)), 3600.0, "system prompt")
    assert (done.blocks, done.nbytes) == (3, 3 * SLOT)
    assert store.pin("one", Selection(), 1.0, "").blocks == 3, "a repeat is answered by the first"
    for number in range(12):
        h.put(store, rank, f"q{number}", [number])
    assert [place.parts for place in store.where((rank.attach.fingerprint.hex(),), prompt_of("p", 3))] == [1, 1, 1]
    notes = h.folder / f"{next(h.folder.glob('*.host')).name}.notes"
    assert stat.S_IMODE(notes.stat().st_mode) == 0o600
    store.shutdown(remove_host=False)

    store = h.store(spec)
    store.attach(rank.attach)
    (pin,) = store.view().pins
    assert (pin.number, pin.blocks, pin.note) == ("one", 3, "system prompt") and pin.expires > time.time() + 3500
    for number in range(12):
        h.put(store, rank, f"r{number}", [number])
    where = store.where((rank.attach.fingerprint.hex(),), prompt_of("p", 3))
    assert [place.parts for place in where] == [1, 1, 1] and where[0].expires == pin.expires
    assert store.forget(Selection(hashes=prompt_of("p", 3))).blocks == 0, "nothing that is pinned"
    assert store.unpin("one").blocks == 3 and store.unpin("one").blocks == 0
    store.pin("two", Selection(hashes=prompt_of("p", 3)), 0.01, "")
    eventually(lambda: not store.view().pins)
    for number in range(12):
        h.put(store, rank, f"s{number}", [number])
    gone = store.why((rank.attach.fingerprint.hex(),), prompt_of("p", 1))[0]
    assert gone is not None and gone.why == Why.EXPIRED


def test_a_pin_of_most_of_a_tier_is_refused_as_a_whole(h: Harness) -> None:
    store = h.store(h.spec(8))
    rank = h.rank(store)
    h.put(store, rank, "p", list(range(8)))
    with pytest.raises(StoreError, match="90% of a tier at most, 7 of the 8"):
        store.pin("1", Selection(), 60.0, "")
    assert store.view().pins == ()
    assert store.pin("1", Selection(hashes=prompt_of("p", 7)), 60.0, "").blocks == 7
    with pytest.raises(StoreError, match="90%"):
        store.pin("2", Selection(hashes=prompt_of("p", 8)[-32:]), 60.0, "")
    assert [pin.number for pin in store.view().pins] == ["1"]
    assert store.pin("3", Selection(hashes=prompt_of("none", 2)), 60.0, "").blocks == 0


# -- forgetting ---------------------------------------------------------------------------------------------


def test_forget_by_model_tenant_prefix_and_tier(h: Harness) -> None:
    store = h.store(h.spec(16, 16, cascade=Cascade.WRITE))
    rank, other = h.rank(store), h.rank(store, type(E)("other"), model="m2")
    name = (rank.attach.fingerprint.hex(),)
    put_as(h, store, rank, "a", [0, 1], A)
    put_as(h, store, rank, "b", [2, 3], B)
    h.put(store, rank, "n", [4, 5])
    h.put(store, other, "m", [0, 1])
    eventually(lambda: sum(tier.used for tier in store.status().tiers) == 16)

    def held() -> set[str]:
        asked = {"a": name, "b": name, "n": name, "m": (other.attach.fingerprint.hex(),)}
        return {one for one, prints in asked.items() if store.where(prints, prompt_of(one, 1))[0].parts}

    assert store.forget(Selection(medium=Medium.HOST)).blocks == 8 and held() == {"a", "b", "n", "m"}
    assert store.forget(Selection(tenant=A.hex())).blocks == 2 and held() == {"b", "n", "m"}
    assert store.forget(Selection(tenant="00" * 8, fingerprints=name)).blocks == 2 and held() == {"b", "m"}
    assert store.forget(Selection(fingerprints=(other.attach.fingerprint.hex(),))).blocks == 2 and held() == {"b"}
    assert store.forget(Selection(hashes=prompt_of("b", 2))).blocks == 2 and held() == set()
    assert store.forget(Selection()).blocks == 0 and store.view().models[0].blocks == 0


def test_forget_removes_files_of_the_shared_folder(h: Harness) -> None:
    tiers = (TierSpec(Medium.HOST, 8 * SLOT), TierSpec(Medium.FS, 1 << 30, str(h.folder / "fs")))
    (h.folder / "fs").mkdir()
    spec = dataclasses.replace(h.spec(8), tiers=tiers, cascade=Cascade.WRITE)
    store = h.store(spec)
    rank = h.rank(store)
    h.put(store, rank, "p", [0, 1])
    h.put(store, rank, "q", [2, 3])

    def files() -> int:
        return sum(1 for path in (h.folder / "fs").rglob("*") if path.is_file() and len(path.name) == 98)

    eventually(lambda: files() == 4 and store.status().tiers[1].used == 4)
    done = store.forget(Selection(hashes=prompt_of("p", 2)))
    assert files() == 2 and done.blocks == 4 and "2 files" in done.said
    store.shutdown(remove_host=True)  # the next life does not know of any file
    store = h.store(dataclasses.replace(spec, name="again"))
    store.attach(rank.attach)
    assert store.forget(Selection(fingerprints=(rank.attach.fingerprint.hex(),))).blocks == 0 and files() == 0


# -- quotas -------------------------------------------------------------------------------------------------


def test_a_tenant_over_its_quota_loses_its_own_coldest_blocks(h: Harness) -> None:
    spec = h.spec(16)
    store = h.store(spec)
    rank = h.rank(store)
    mine = (rank.attach.fingerprint.hex(),)
    put_as(h, store, rank, "other", [0, 1], B)
    for prompt in "pqrs":
        put_as(h, store, rank, prompt, [2, 3], A)
    assert store.set_quota(A.hex(), 6 * SLOT + 1).blocks == 2

    def held() -> str:
        return "".join(one for one in "pqrstu" if store.where(mine, prompt_of(one, 2))[1].parts)

    assert held() == "qrs"
    store.settle(E, Settle(releases=(store.look_up(E, look_up("q", 2)).lease or 0,)))  # type: ignore[arg-type]
    put_as(h, store, rank, "t", [4, 5], A)
    assert held() == "qst", "what was asked for stays"
    assert store.where(mine, prompt_of("other", 2))[1].parts == 1
    store.shutdown(remove_host=False)
    store = h.store(spec)
    store.attach(rank.attach)
    view = {one.tag: (one.blocks, one.quota) for one in store.view().tenants}
    assert view == {A.hex(): (6, 6 * SLOT + 1), B.hex(): (2, None)}, "both are known after a restart"
    put_as(h, store, rank, "u", [6, 7], A)
    assert {one.tag: one.blocks for one in store.view().tenants} == {A.hex(): 6, B.hex(): 2}
    assert "no limit" in store.set_quota(A.hex(), None).said
    for number in range(3):
        put_as(h, store, rank, f"v{number}", [6, 7], A)
    assert {one.tag: one.blocks for one in store.view().tenants}[A.hex()] == 12


# -- what takes long ----------------------------------------------------------------------------------------


def test_verify_reads_all_and_takes_bad_slots_out_of_use(h: Harness) -> None:
    store = h.store(h.spec(8, 8, cascade=Cascade.WRITE))
    rank = h.rank(store)
    h.put(store, rank, "p", [0, 1, 2])
    eventually(lambda: sum(tier.used for tier in store.status().tiers) == 6)
    slots = store._stock.tiers.rows(0)  # type: ignore[union-attr]
    assert slots is not None
    assert store.look_up(E, look_up("p", 3)).num_blocks == 3, "leased ones are checked too"
    slots[1] ^= 255
    first = store.begin(Operation("v", OperationKind.VERIFY))
    assert first.number == "v" and first.total == 6
    state = finished(store, "v")
    assert (state.done, state.total, state.error) == (6, 6, "") and "6 blocks were read and 1 " in state.result
    assert [tier.quarantined for tier in store.status().tiers] == [1, 0]
    assert store.begin(Operation("v", OperationKind.VERIFY)) == state, "a repeat is answered by the first"
    with pytest.raises(StoreError, match="is a verify, and this one is a prefetch"):
        store.begin(Operation("v", OperationKind.PREFETCH, Selection()))


def test_prefetch_copies_up_what_a_slower_tier_has(h: Harness) -> None:
    spec = h.spec(8, 32, cascade=Cascade.WRITE)
    store = h.store(spec)
    rank = h.rank(store)
    before = rank.blocks([0, 1, 2])
    h.put(store, rank, "p", [0, 1, 2])
    eventually(lambda: store.status().tiers[1].used == 3)
    store.forget(Selection(medium=Medium.HOST))
    store.begin(Operation("1", OperationKind.PREFETCH, Selection(hashes=prompt_of("p", 3))))
    state = finished(store, "1")
    assert (state.done, state.total, state.error) == (3, 3, "") and "3 blocks were copied up" in state.result
    rank.wipe(range(24))
    found = store.look_up(E, look_up("p", 3))
    assert found.media == (Medium.HOST,) * 3
    assert h.get(store, rank, found, [7, 8, 9]).ok and rank.blocks([7, 8, 9]) == before
    store.begin(Operation("2", OperationKind.PREFETCH, Selection(hashes=prompt_of("p", 3))))
    assert "0 blocks were copied up, 3 were there already" in finished(store, "2").result


def test_prefetch_finds_what_other_nodes_wrote(h: Harness) -> None:
    (h.folder / "fs").mkdir()
    tiers = (TierSpec(Medium.HOST, 8 * SLOT), TierSpec(Medium.FS, 1 << 30, str(h.folder / "fs")))
    spec = dataclasses.replace(h.spec(8), tiers=tiers, cascade=Cascade.WRITE)
    writer, reader = h.store(spec), h.store(dataclasses.replace(spec, name="reader"))
    rank = h.rank(writer)
    reader.attach(rank.attach)
    h.put(writer, rank, "p", [0, 1, 2, 3])
    eventually(lambda: writer.status().tiers[1].used == 4)
    reader.begin(Operation("1", OperationKind.PREFETCH, Selection(hashes=prompt_of("p", 4))))
    state = finished(reader, "1")
    assert state.error == "" and "4 blocks were copied up" in state.result
    assert reader.look_up(E, look_up("p", 4)).media == (Medium.HOST,) * 4


def test_bad_orders_begin_nothing(h: Harness) -> None:
    store = h.store(h.spec(4))
    h.rank(store)
    for order, why in (
        (Operation("1", OperationKind.PREFETCH, Selection()), "one tier only"),
        (Operation("1", OperationKind.PREFETCH), "said by a Selection"),
        (Operation("1", OperationKind.VERIFY, Selection(hashes=bytes(32))), "by medium only"),
        (Operation("1", OperationKind.VERIFY, Selection(medium=Medium.DISK)), "no disk tier: it has host"),
        (Operation("", OperationKind.VERIFY), "a text of 1 to"),
        ("verify", "An order is an Operation"),
    ):
        with pytest.raises(StoreError, match=why):
            store.begin(order)  # type: ignore[arg-type]
    with pytest.raises(StoreError, match="knows no operation"):
        store.operation("1")
    assert store.operations() == ()


def test_operators_calls_have_threads_of_their_own() -> None:
    methods = ("view", "where", "why", "pin", "unpin", "forget", "set_quota", "begin", "operation", "operations")
    assert {GROUP_OF[method] for method in methods} == {"admin"} and GROUPS["admin"] == 2
    assert all(hasattr(NodeStore, method) for method in methods) and RUNNING >= 2


# -- bad input, and any ---------------------------------------------------------------------------------------

ODD: list[Any] = [
    None,
    "",
    "x" * 40,
    b"",
    b"x",
    -1,
    0,
    1 << 70,
    1.5,
    float("nan"),
    float("inf"),
    True,
    (),
    ("00",),
    [],
    {},
]


def test_bad_input_is_one_sentence_and_changes_nothing(h: Harness) -> None:
    store = h.store(h.spec(8, 8))
    rank = h.rank(store)
    h.put(store, rank, "p", [0, 1])
    before = (store.view(), store.where((rank.attach.fingerprint.hex(),), prompt_of("p", 2)))
    calls: list[Any] = []
    for odd in ODD:
        calls.append(lambda odd=odd: store.pin("n", odd, 5.0, ""))
        if not isinstance(odd, str) or not odd:
            calls.append(lambda odd=odd: store.pin(odd, Selection(), 5.0, ""))
            calls.append(lambda odd=odd: store.unpin(odd))
        if not isinstance(odd, str):
            calls.append(lambda odd=odd: store.pin("n", Selection(hashes=prompt_of("p", 1)), 5.0, odd))
        if odd not in (1.5,):
            calls.append(lambda odd=odd: store.pin("n", Selection(hashes=prompt_of("p", 1)), odd, ""))
        if odd not in ("",):
            calls.append(lambda odd=odd: store.forget(Selection(tenant=odd)))
        if odd not in ((), []):
            calls.append(lambda odd=odd: store.forget(Selection(fingerprints=odd)))
        if odd not in (b"",):
            calls.append(lambda odd=odd: store.forget(Selection(hashes=odd)))
        if odd is not None:
            calls.append(lambda odd=odd: store.forget(Selection(medium=odd)))
        calls.append(lambda odd=odd: store.set_quota(odd, 5))
        if odd not in (None, 0):
            calls.append(lambda odd=odd: store.set_quota(A.hex(), odd))
        calls.append(lambda odd=odd: store.begin(odd))
        calls.append(lambda odd=odd: store.operation(odd))
    calls.append(lambda: store.set_quota("00" * 8, 5))
    calls.append(lambda: store.forget(Selection(medium=Medium.PEER)))
    for call in calls:
        with pytest.raises(StoreError) as raised:
            call()
        assert "\n" not in str(raised.value) and str(raised.value).endswith((".", "it.")), raised.value
    assert (store.view(), store.where((rank.attach.fingerprint.hex(),), prompt_of("p", 2))) == before


def fuzz(h: Harness, calls: int, seed: int) -> None:
    """Random calls of all methods with good and bad arguments, while an engine saves and looks up."""
    dice = random.Random(seed)
    store = h.store(h.spec(12, 24, cascade=dice.choice(list(Cascade)), lease_s=0.2))
    ranks = [h.rank(store), h.rank(store, type(E)("other"), model="m2")]
    prints = [rank.attach.fingerprint.hex() for rank in ranks]
    stop = threading.Event()
    broken: list[BaseException] = []

    def work() -> None:
        own, job = random.Random(seed + 1), 1_000_000
        try:
            while not stop.is_set():
                rank, count, prompt, job = own.choice(ranks), own.randint(1, 6), f"p{own.randrange(9)}", job + 1
                save = SaveJob(
                    JobId(job),
                    (prompt_of(prompt, count),),
                    (tuple(range(count)),),
                    own.choice([(), (((own.choice([A, B]), count),),)]),
                )
                _, (done,) = store.save(store.life, rank.attach.engine, rank.attach.rank, [save])
                assert done.ok, done.error
                store.settle(rank.attach.engine, Settle(commits=(save.job,)))
                store.look_up(rank.attach.engine, look_up(prompt, count, f"r{own.randrange(3)}"))
        except BaseException as error:
            broken.append(error)

    def selection() -> Any:
        good = Selection(
            dice.choice([(), (prints[0],), tuple(prints)]),
            dice.choice(["", A.hex(), B.hex(), "00" * 8]),
            dice.choice([b"", prompt_of(f"p{dice.randrange(9)}", dice.randint(1, 6)), digest("none")]),
            dice.choice([None, None, Medium.HOST, Medium.DISK]),
        )
        if dice.random() < 0.1:
            return dataclasses.replace(good, **{dice.choice([f.name for f in dataclasses.fields(good)]): odd()})
        return good if dice.random() < 0.95 else odd()

    def odd() -> Any:
        return dice.choice(ODD)

    def or_odd(value: Any) -> Any:
        return value if dice.random() < 0.9 else odd()

    def number() -> Any:
        return or_odd(str(dice.randrange(6)))

    methods: list[Any] = [
        store.view,
        lambda: store.where(or_odd(tuple(prints)), or_odd(prompt_of("p1", 4))),
        lambda: store.why(or_odd(tuple(prints[:1])), or_odd(prompt_of("p1", 4))),
        lambda: store.pin(number(), selection(), or_odd(dice.choice([0.001, 0.1, 50.0])), or_odd("")),
        lambda: store.unpin(number()),
        lambda: store.forget(selection()),
        lambda: store.set_quota(or_odd(dice.choice([A, B]).hex()), or_odd(dice.choice([None, 0, 4 * SLOT, 9 * SLOT]))),
        lambda: store.begin(
            Operation(or_odd(str(dice.random())), or_odd(dice.choice(list(OperationKind))), selection())
        ),
        lambda: store.operation(number()),
        store.operations,
        lambda: store.clear(dice.choice([None, Medium.HOST, Medium.DISK, Medium.FS])),
    ]
    thread = threading.Thread(target=work)
    thread.start()
    said = 0
    try:
        for _ in range(calls):
            try:
                dice.choice(methods)()
            except StoreError as error:
                said += 1
                assert str(error) and "\n" not in str(error)
    finally:
        stop.set()
        thread.join()
    assert not broken, broken
    assert said > calls // 50, "bad input was among it"
    eventually(lambda: not any(state.running for state in store.operations()))
    assert not [state for state in store.operations() if state.error]
    store.check_integrity()
    counted = {one.tag: one.blocks for one in store.view().tenants if one.blocks}
    stock = store._stock
    assert stock is not None
    with stock.lock:  # from the headers
        places = [place for part in stock.book.select(_ALL, ()) for _, place in part()]
        tags = [header.tenant.hex() for place in places if (header := stock.tiers.header(place)) is not None]
    assert counted == {tag: tags.count(tag) for tag in set(tags) if tag != "00" * 8}


def _all() -> Any:
    from raykv.core.selections import Chosen

    return Chosen(frozenset(), None, None, None)


_ALL = _all()


@pytest.mark.parametrize("seed", range(2))
def test_whatever_operators_call_the_store_stays_sound(h: Harness, seed: int) -> None:
    fuzz(h, 400, seed)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_ten_thousand_calls_of_operators(h: Harness) -> None:
    fuzz(h, 10_000, 7)
