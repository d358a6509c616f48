"""The parts of a TierConnector by themselves: look-ups, jobs and pins, the worker half, the hooks, statistics."""

from __future__ import annotations

import inspect
import pickle
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA, supports_hma

import raykv.connector
from raykv.config import RunMode, parse
from raykv.config.tiers import TierOptions, parse_tiers
from raykv.connector import TierConnector, plugin, tier_setup
from raykv.connector.tier_jobs import TierJobs
from raykv.connector.tier_known import block_key
from raykv.connector.tier_lookups import Outcome, TierLookUps
from raykv.connector.tier_metadata import TierLoad, TierMetadata, TierWorkerMeta
from raykv.connector.tier_stats import TierStats, loaded
from raykv.connector.tier_worker import TierWorker, WorkerFacts
from raykv.engine_messages import Why
from raykv.errors import ConfigError, IntegrityError, StoreError
from raykv.store_messages import (
    HASH_NBYTES,
    Attached,
    GroupLayout,
    JobDone,
    LoadJob,
    LookedUp,
    Medium,
    RankAttach,
    SaveJob,
)
from raykv.types import EngineId, JobId, LeaseId, Rank, RequestId, StoreLife
from tests.support.configs import multi
from tests.support.fake_config import kv_cache_config, vllm_config
from tests.support.tier_bench import tier_child

pytestmark = pytest.mark.vllm
LIFE = StoreLife("life")
R = RequestId("r")


# -- look-ups -------------------------------------------------------------------------------------------------


class Asker:
    store = "raykv-store-default-00"

    def __init__(self) -> None:
        self.asked: list[RequestId] = []
        self.answers: list[LookedUp] = []
        self.released: list[LeaseId] = []

    def ask(self, look_up: Any) -> None:
        self.asked.append(look_up.request)

    def answer(self, number: int, blocks: int) -> None:
        lease = LeaseId(number) if blocks else None
        self.answers.append(LookedUp(LIFE, self.asked[number], blocks, lease, (Medium.HOST,) * blocks))

    def take_answers(self) -> list[LookedUp]:
        taken, self.answers = self.answers, []
        return taken

    def release(self, leases: Any) -> None:
        self.released += leases


def look_ups() -> tuple[Asker, TierLookUps]:
    asker = Asker()
    return asker, TierLookUps(asker, 1.0, 60.0)  # type: ignore[arg-type]


def test_polling_changes_nothing() -> None:
    asker, book = look_ups()
    book.ask(R, b"h", 0.0)
    assert [book.poll(R, 0.5) for _ in range(3)] == [(Outcome.PENDING, 0)] * 3
    asker.answer(0, 4)
    assert [book.poll(R, 0.9) for _ in range(3)] == [(Outcome.HELD, 4)] * 3
    answer = book.take(R)
    assert answer is not None and answer.lease == 0
    assert len(asker.asked) == 1 and asker.released == [] and len(book) == 0


def test_an_answer_after_the_limit_gives_its_lease_back() -> None:
    asker, book = look_ups()
    book.ask(R, b"h", 0.0)
    assert book.poll(R, 1.0) == (Outcome.MISS, 0)
    asker.answer(0, 4)
    assert book.poll(R, 1.1) == (Outcome.MISS, 0)
    assert asker.released == [0] and book.take(R) is None and book.timed_out == 1


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_answer_to_an_older_question_of_the_request_is_not_taken(order: tuple[int, int]) -> None:
    """The prompt may be another one: vLLM lets a client use an id again."""
    asker, book = look_ups()
    book.ask(R, b"old", 0.0)
    book.drop(R)
    book.ask(R, b"new", 0.1)
    for number in order:
        asker.answer(number, 7 - number)
    assert book.poll(R, 0.2) == (Outcome.HELD, 6)
    assert asker.released == [0]


def test_why_it_is_a_miss_is_known() -> None:
    asker, found = look_ups()
    assert found.why_missed(R) is None
    found.ask(R, b"x" * HASH_NBYTES, 0.0)
    assert found.why_missed(R) is None, "nothing is known yet"
    assert found.poll(R, 2.0) == (Outcome.MISS, 0) and found.why_missed(R) is Why.TIMED_OUT
    found.ask(R, b"x" * HASH_NBYTES, 3.0)
    asker.answer(1, 0)
    assert found.poll(R, 3.1) == (Outcome.MISS, 0) and found.why_missed(R) is None, "nothing was found"
    asker.store = ""
    found.ask(R, b"x" * HASH_NBYTES, 4.0)
    asker.answer(2, 0)
    assert found.poll(R, 4.1) == (Outcome.MISS, 0) and found.why_missed(R) is Why.CHILD_OFF
    found.drop(R)
    assert found.why_missed(R) is None


def test_a_lease_is_given_back_once() -> None:
    asker, book = look_ups()
    book.ask(R, b"h", 0.0)
    asker.answer(0, 4)
    book.drain(0.0)
    assert book.poll(R, 31.0) == (Outcome.STALE, 0)
    book.drop(R)
    assert book.take(R) is None and asker.released == [0]


# -- jobs and pins --------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Block:
    block_id: int
    ref_cnt: int = 1


def test_a_job_ends_when_every_rank_has_said_so() -> None:
    jobs, blocks = TierJobs(2), [Block(1), Block(2)]
    job = jobs.begin(blocks)
    done = JobDone(job, ok=True)
    assert jobs.report(Rank(0), done) is None
    assert jobs.report(Rank(0), done) is None, "a repeated report must not count for another rank"
    jobs.check_integrity()
    assert jobs.pinned() == {1: 1, 2: 1} and jobs.frees_soon()
    ended = jobs.report(Rank(1), JobDone(job, ok=False))
    assert ended is not None and not ended.ok and list(ended.unpin) == blocks[::-1]
    assert jobs.report(Rank(1), done) is None and not jobs and jobs.pinned() == {}
    jobs.check_integrity()


def test_a_block_that_a_request_holds_too_is_not_about_to_be_freed() -> None:
    jobs, block = TierJobs(1), Block(1, ref_cnt=3)
    jobs.begin([block])
    jobs.begin([block])
    assert not jobs.frees_soon()
    block.ref_cnt = 2
    assert jobs.frees_soon()


def test_a_lost_pin_is_found() -> None:
    jobs = TierJobs(1)
    jobs.begin([Block(1)])
    jobs._pins[1] += 1
    with pytest.raises(IntegrityError):
        jobs.check_integrity()


# -- the worker half ------------------------------------------------------------------------------------------


class Link:
    def __init__(self) -> None:
        self.life: StoreLife | None = LIFE
        self.calls: list[Any] = []
        self.done: list[JobDone] = []

    def start(self, timeout_s: float) -> Attached:
        return Attached(LIFE, 1, 1, 4096)

    def save(self, jobs: Any) -> None:
        self.calls += jobs

    def load(self, jobs: Any) -> None:
        self.calls += jobs

    def take_done(self) -> list[JobDone]:
        done, self.done = self.done, []
        return done

    def close(self) -> None:
        self.calls.append("close")


SAVE = SaveJob(JobId(1), (b"h" * HASH_NBYTES,), ((5,),))
LOAD = TierLoad(R, LIFE, LoadJob(JobId(2), LeaseId(3), ((0,),), ((6,),)))


def worker(writes: bool = True) -> tuple[Link, TierWorker, list[RankAttach]]:
    link, attached = Link(), []
    facts = WorkerFacts(EngineId("e"), Rank(0), 1, 8, (GroupLayout(("a",)),), writes)

    def open_link(attach: RankAttach) -> Link:
        attached.append(attach)
        return link

    half = TierWorker(facts, lambda caches: b"f" * 16, open_link)
    half.register_kv_caches({"a": torch.zeros(8, 64)})
    return link, half, attached


def test_a_rank_says_what_it_is() -> None:
    _, half, (attach,) = worker()
    assert (attach.engine, attach.rank, attach.num_ranks, attach.num_blocks) == ("e", 0, 1, 8)
    assert attach.fingerprint == b"f" * 16 and attach.started > 0 and attach.writes
    half.shutdown()


def test_the_forward_pass_is_fenced_before_the_save_is_handed_over() -> None:
    link, half, _ = worker()
    assert half._export is not None
    half._export.forward_done = lambda: link.calls.append("fence")  # type: ignore[method-assign]
    half.bind(TierMetadata(save=SAVE))
    half.start_load_kv()
    assert link.calls == []
    half.wait_for_save()
    half.clear()
    assert link.calls == ["fence", SAVE] and half.take_meta() is None
    link.done = [JobDone(SAVE.job, ok=True)]
    assert half.get_transfer_results().finished_recving == set()
    meta = half.take_meta()
    assert meta is not None and meta.done == {(1, 0): JobDone(SAVE.job, ok=True)}
    half.shutdown()
    assert link.calls[-1] == "close"


@pytest.mark.parametrize("cleared", [True, False])
def test_a_save_that_was_not_asked_for_has_failed(cleared: bool) -> None:
    link, half, _ = worker()
    half.bind(TierMetadata(save=SAVE))
    half.start_load_kv()
    half.get_transfer_results()
    assert half.take_meta() is None
    half.clear() if cleared else half.bind(TierMetadata())
    meta = half.take_meta()
    assert meta is not None and not meta.done[(SAVE.job, Rank(0))].ok and link.calls == []


def test_speculative_decoding_saves_after_the_reports() -> None:
    link, half, _ = worker()
    half.bind(TierMetadata(save=SAVE))
    half.start_load_kv()
    half.get_transfer_results()
    assert half.take_meta() is None
    half.wait_for_save()
    half.clear()
    assert link.calls == [SAVE]


def test_a_replica_saves_nothing_and_is_done() -> None:
    link, half, _ = worker(writes=False)
    half.bind(TierMetadata(save=SAVE))
    half.wait_for_save()
    meta = half.take_meta()
    assert meta is not None and meta.done[(SAVE.job, Rank(0))].ok and link.calls == []


@pytest.mark.parametrize("ok", [True, False])
def test_a_load_is_handed_over_once_and_reported_once(ok: bool) -> None:
    link, half, _ = worker()
    half.bind(TierMetadata(loads=(LOAD,)))
    half.start_load_kv()
    half.start_load_kv()
    half.wait_for_save()
    half.clear()
    assert link.calls == [LOAD.job]
    link.done = [JobDone(LOAD.job.job, ok=ok)]
    results = half.get_transfer_results()
    assert results.finished_recving == {R} and results.failed_recving == (set() if ok else {R})
    again = half.get_transfer_results()
    assert again.finished_recving == again.failed_recving == set()
    meta = half.take_meta()
    assert meta is not None and meta.done[(LOAD.job.job, Rank(0))].ok == ok


@pytest.mark.parametrize("how", ["other life", "away", "refused"])
def test_a_load_without_a_good_lease_fails_untouched(how: str) -> None:
    link, half, _ = worker()
    link.life = {"other life": StoreLife("next"), "away": None, "refused": LIFE}[how]
    half.bind(TierMetadata(refused=(LOAD,)) if how == "refused" else TierMetadata(loads=(LOAD,)))
    half.start_load_kv()
    assert link.calls == []
    results = half.get_transfer_results()
    assert results.finished_recving == results.failed_recving == {R}


def test_a_layer_without_a_cache_is_an_error() -> None:
    half = TierWorker(
        WorkerFacts(EngineId("e"), Rank(0), 1, 8, (GroupLayout(("a", "b")),)), lambda _: b"", lambda _: Link()
    )
    with pytest.raises(StoreError, match="for b"):
        half.register_kv_caches({"a": torch.zeros(8, 64)})


def test_ranks_come_together() -> None:
    mine = TierWorkerMeta({(JobId(1), Rank(0)): JobDone(JobId(1), ok=True)})
    theirs = pickle.loads(pickle.dumps(TierWorkerMeta({(JobId(1), Rank(1)): JobDone(JobId(1), ok=False)})))
    assert {key: done.ok for key, done in mine.aggregate(theirs).done.items()} == {(1, 0): True, (1, 1): False}


# -- keys -----------------------------------------------------------------------------------------------------


def test_keys_have_one_size_and_salts_part_them() -> None:
    keys = [block_key(b"h" * n, salt) for n in (16, 32, 33, 64) for salt in (b"", b"s" * 16, b"t" * 32)]
    assert len(set(keys)) == len(keys) and {len(key) for key in keys} == {HASH_NBYTES}
    assert block_key(b"h" * 32) == b"h" * 32


# -- what vLLM sees -------------------------------------------------------------------------------------------

AS_THE_BASE = {
    "role", "has_connector_metadata", "supports_divergent_local_hybrid_hits", "requires_kv_delivery",
    "requires_piecewise_for_cudagraph", "get_required_kvcache_layout", "get_finished_count", "bind_gpu_block_pool",
    "get_loaded_kv_cache_group_ids", "register_finished_partial_tail", "set_host_xfer_buffer_ops",
    "set_xfer_handshake_metadata",
    "handle_preemptions", "finish_forward", "reset_capture_state", "get_block_ids_with_load_errors",
    "get_kv_connector_kv_cache_events",
}  # fmt: skip
NEW_IN_033 = {"supports_sleep_mode", "unregister_kv_caches", "restore_kv_caches"}


def public_hooks(cls: type) -> set[str]:
    return {name for name, _ in inspect.getmembers_static(cls) if not name.startswith("_")}


def test_each_hook_was_decided_about() -> None:
    known = public_hooks(KVConnectorBase_V1) | public_hooks(SupportsHMA)
    own = {name for name in vars(TierConnector) if not name.startswith("_")}
    assert known - own == AS_THE_BASE
    assert own - known == NEW_IN_033 | {"raykv_is_inner", "raykv_part", "raykv_facts", "raykv_key_salt"}


def test_signatures_are_those_of_the_base() -> None:
    for name in sorted((public_hooks(KVConnectorBase_V1) | public_hooks(SupportsHMA)) - AS_THE_BASE):
        base = inspect.getattr_static(KVConnectorBase_V1, name, None) or inspect.getattr_static(SupportsHMA, name)
        own = inspect.getattr_static(TierConnector, name)
        theirs, ours = (list(inspect.signature(getattr(f, "__func__", f)).parameters.values()) for f in (base, own))
        assert [(p.name, p.kind) for p in ours] == [(p.name, p.kind) for p in theirs], name


def test_it_is_found_by_module_and_by_name() -> None:
    assert raykv.connector.TierConnector is TierConnector and supports_hma(TierConnector)
    plugin.register()
    assert KVConnectorFactory.get_connector_class_by_name("TierConnector") is TierConnector


@pytest.mark.parametrize("module", ["raykv.connector", None])
def test_as_a_child_it_runs_inline(module: str | None) -> None:
    child = {**tier_child(), "kv_connector_module_path": module}
    assert parse(multi([child])).children[0].options.run is RunMode.INLINE
    with pytest.raises(ConfigError, match="the node's store does its work"):
        parse(multi([{**tier_child(raykv={"run": "actor"}), "kv_connector_module_path": module}]))
    assert parse(multi([{**child, "kv_connector_module_path": "mine"}])).children[0].options.run is RunMode.ACTOR


@pytest.mark.parametrize(
    ("role", "options", "left"),
    [
        ("kv_both", {}, "kv_both"),
        ("kv_both", {"save": "none"}, "kv_consumer"),
        ("kv_both", {"load": False}, "kv_producer"),
        ("kv_consumer", {"save": "none"}, "kv_consumer"),
        ("kv_producer", {"load": False}, "kv_producer"),
        ("kv_producer", {"save": "none"}, None),
        ("kv_consumer", {"load": False}, None),
        ("kv_both", {"load": False, "save": "none"}, None),
    ],
)
def test_the_options_of_a_child_become_its_role(role: str, options: dict[str, Any], left: str | None) -> None:
    config = multi([tier_child(role, raykv=options)])
    if left is None:
        with pytest.raises(ConfigError, match="child TierConnector neither loads nor saves"):
            parse(config)
    else:
        (child,) = parse(config).children
        assert child.role == role and child.kv_transfer_kwargs()["kv_role"] == left


def test_a_child_joins_the_cluster_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = {"ray_address": "10.0.0.1:6379", "namespace": "blue"}
    one, own, theirs = parse(
        multi([tier_child(), tier_child(namespace="red"), {"kv_connector": "ExampleConnector"}], raykv=whole)
    ).children
    assert parse_tiers(own.extra).namespace == "red" and parse_tiers(own.extra).ray_address == "10.0.0.1:6379"
    assert theirs.extra == {}
    (alone,) = parse(multi([tier_child()])).children
    assert parse_tiers(alone.extra) == TierOptions(parse_tiers(alone.extra).store)
    joined: list[Any] = []
    monkeypatch.setattr(
        tier_setup.cluster, "connect", lambda *args, **kw: joined.append((args, kw)) or SimpleNamespace(node_id="n")
    )
    monkeypatch.setattr(tier_setup.store_handle, "open_store", lambda *args, **kw: joined.append((args[1:], kw)))
    tier_setup.open_store(parse_tiers(one.extra))
    assert joined == [(("10.0.0.1:6379",), {"namespace": "blue"}), (("n",), {"namespace": "blue"})]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"decode_context_parallel_size": 2}, "context parallelism"),
        ({"nnodes": 2}, "2 nodes"),
    ],
)
def test_what_can_not_be_served_is_refused(change: dict[str, Any], words: str) -> None:
    config = vllm_config({**tier_child(), "engine_id": "e"})
    for name, value in change.items():
        setattr(config.parallel_config, name, value)
    with pytest.raises(ConfigError, match=words):
        tier_setup.checked_options(config, kv_cache_config(8))


# -- statistics -----------------------------------------------------------------------------------------------


def test_statistics_add_up_and_show_in_prometheus() -> None:
    registry = CollectorRegistry()

    def made(kind: Any) -> Any:
        return lambda name, **options: kind(name, registry=registry, **options)

    metrics = TierConnector.build_prom_metrics(
        vllm_config({**tier_child(), "engine_id": "e"}),
        {kind: made(kind) for kind in (Counter, Gauge, Histogram)},
        ["engine"],
        {0: ["0"]},
    )
    first = TierStats(data={"loads": 1, loaded(Medium.HOST): 32})
    both = TierConnector.build_kv_connector_stats(first.to_dict()).aggregate(
        TierStats(data={"loads": 2, "look_ups": 3})
    )
    assert both.reduce() == {"loads": 3, "tokens_loaded_host": 32, "look_ups": 3} and not both.is_empty()
    metrics.observe(both.to_dict(), 0)
    sample = registry.get_sample_value
    assert sample("vllm:raykv_tier_loads_total", {"engine": "0"}) == 3
    assert sample("vllm:raykv_tier_tokens_loaded_total", {"engine": "0", "medium": "host"}) == 32
    both.reset()
    assert both.is_empty()
