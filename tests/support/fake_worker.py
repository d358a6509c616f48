"""An engine without engine: vLLM's real scheduler, and fake workers around the real RayMultiConnector.

`Bench` steps like `EngineCore.step`, or like `step_with_batch_queue` with two steps in flight. The rest of an engine
is in `fake_executor` (workers), `fake_model` (what they compute) and `in_process_hosts` (RayKV's hosts, without Ray).
"""

from __future__ import annotations

import functools
import pickle
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace, TracebackType
from typing import Any, Self

import pytest
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.support.configs import multi
from tests.support.fake_config import kv_cache_config, vllm_config
from tests.support.fake_control import Control, controls, holds
from tests.support.fake_executor import FakeExecutor
from tests.support.fake_model import FakeRunner, continuation
from tests.support.in_process_hosts import FakeProcess, Hosts

PATIENCE_S = 60.0
"""How long a test waits for what must come; never a measure of speed."""


@dataclass
class Result:
    """What a request came to."""

    prompt: list[int]
    wanted: int
    tokens: list[int] = field(default_factory=list)
    reason: Any = None
    params: dict[str, Any] | None = None
    aborted: bool = False

    @property
    def expected(self) -> list[int]:
        return continuation(self.prompt, self.wanted)


@dataclass
class Heard:
    """What vLLM acted on in one step, after RayKV's filter."""

    step: int
    received: frozenset[str]
    sent: frozenset[str]
    failed: frozenset[str]
    invalid: frozenset[int]


class Bench:
    """One engine. Use it as a context manager: its end checks that nothing is left over."""

    def __init__(
        self,
        children: Sequence[dict[str, Any]],
        *,
        ranks: int = 1,
        async_scheduling: bool = False,
        num_blocks: int = 64,
        block_size: int = 16,
        window: int | None = None,
        connector: str = "RayMultiConnector",
        raykv: Mapping[str, Any] | None = None,
        batched_tokens: int = 512,
        sequences: int = 16,
        transfer: Mapping[str, Any] | None = None,
        eager: Callable[[], bool] = lambda: False,
    ) -> None:
        """`eager`: with two steps in flight, whether a step is run when it is planned, or only when it is due."""
        self.transfer = {
            **multi(children, raykv=raykv),
            "kv_connector": connector,
            "engine_id": "e",
            **(transfer or {}),
        }
        self._make = functools.partial(
            vllm_config,
            self.transfer,
            ranks,
            block_size,
            async_scheduling=async_scheduling,
            max_num_batched_tokens=batched_tokens,
            max_num_seqs=sequences,
        )
        self.names = [c["kv_connector_extra_config"]["fake"] for c in children]
        self.ranks, self.block_size, self._async, self._eager = ranks, block_size, async_scheduling, eager
        self.cache_config = kv_cache_config(num_blocks, block_size, window)
        self.hosts = Hosts()
        self.results: dict[str, Result] = {}
        self.heard: list[Heard] = []
        self.events: list[Any] = []
        self.stats: list[dict[str, Any]] = []
        self.steps = 0
        self.violations: list[str] = []
        self._in_flight: deque[list[Any]] = deque()
        self._aborts: list[str] = []
        self._monkeypatch = pytest.MonkeyPatch()

    def __enter__(self) -> Self:
        holds.__init__()  # type: ignore[misc]
        controls.clear()
        self.hosts.patch(self._monkeypatch)
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.check()
        finally:
            self.close()

    def _start(self) -> None:
        init_none_hash(sha256)
        groups = [(g.layer_names, getattr(g.kv_cache_spec, "sliding_window", None)) for g in self.groups]
        self.runner = FakeRunner(groups, self.ranks, self.cache_config.num_blocks, self.block_size)
        self.workers: list[Any] = []
        for rank in range(self.ranks):
            config = self._make()
            config.parallel_config.rank = rank
            worker = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, self.cache_config)
            self.workers.append(worker)
            worker.register_kv_caches(self.runner.caches[rank])
        self.config = self._make()
        self.config.cache_config.num_gpu_blocks = self.cache_config.num_blocks
        scheduler_cls = self.config.scheduler_config.get_scheduler_cls()
        self.scheduler = scheduler_cls(
            vllm_config=self.config,
            kv_cache_config=self.cache_config,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=self.block_size,
            hash_block_size=self.block_size,
            log_stats=True,
        )
        self.scheduler.kv_event_publisher = SimpleNamespace(
            publish=lambda batch: self.events.extend(batch.events), shutdown=lambda: None
        )
        self.connector = self.scheduler.connector
        self.half = self.connector._scheduler_half
        handshakes = {(0, r): h for r, w in enumerate(self.workers) if (h := w.get_handshake_metadata()) is not None}
        if handshakes:
            self.connector.set_xfer_handshake_metadata_pp_aware(pickle.loads(pickle.dumps(handshakes)))
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.free_at_start = self.pool.get_num_free_blocks()
        aggregator = KVOutputAggregator.from_connector(self.connector, self.ranks)
        self.executor = FakeExecutor(self.workers, self.runner, aggregator)
        self._hasher = get_request_block_hasher(self.block_size, sha256)
        self._watch_pool()
        self._watch_links()
        self._watch_connector()

    @property
    def groups(self) -> Sequence[Any]:
        return self.cache_config.kv_cache_groups

    # -- watching ---------------------------------------------------------------------------------------------

    def _watch_pool(self) -> None:
        """No block that a host may still touch is handed to somebody else."""
        give = self.pool.get_new_blocks

        def get_new_blocks(count: int) -> list[Any]:
            blocks = give(count)
            owners = holds.of(block.block_id for block in blocks)
            if owners:
                self.violations.append(f"step {self.steps}: blocks were handed out that {owners} may touch")
            return blocks

        self.pool.get_new_blocks = get_new_blocks

    def _watch_links(self) -> None:
        self.links = {
            (self.names[index], rank): link
            for rank, worker in enumerate(self.workers)
            for index, link in worker._worker_half._links.items()
        }
        self._submitted: dict[tuple[str, int], int] = {}
        self._completed: dict[tuple[str, int], int] = {}
        for key, link in self.links.items():

            def submit(record: Any, *args: Any, key: Any = key, inner: Any = link.submit) -> None:
                self._submitted[key] = record.step
                inner(record, *args)

            def publish(events: Any, objects: Any, done: Any, key: Any = key, inner: Any = link._publish) -> None:
                inner(events, objects, done)
                if done is not None:
                    self._completed[key] = max(done, self._completed.get(key, -1))

            link.submit, link._publish = submit, publish

    def _watch_connector(self) -> None:
        inner = self.connector.update_connector_output

        def update(output: KVConnectorOutput) -> None:
            failed, invalid = frozenset(output.failed_recving), frozenset(output.invalid_block_ids)
            inner(output)
            received, sent = frozenset(output.finished_recving or ()), frozenset(output.finished_sending or ())
            if received or sent or failed or invalid:
                self.heard.append(Heard(self.steps, received, sent, failed, invalid))

        self.connector.update_connector_output = update

    # -- requests ---------------------------------------------------------------------------------------------

    def add(
        self,
        prompt: int | Sequence[int],
        name: str | None = None,
        max_tokens: int = 4,
        params: dict[str, Any] | None = None,
        seed: int = 0,
    ) -> str:
        """A new request; `prompt` as a number stands for that many tokens, which differ by `seed`."""
        name = name or f"r{len(self.results)}"
        tokens = [(seed * 131 + i * 7) % 480 + 3 for i in range(prompt)] if isinstance(prompt, int) else list(prompt)
        sampling = SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=True,
            extra_args=None if params is None else {"kv_transfer_params": params},
        )
        request = Request(name, tokens, sampling, None, block_hasher=self._hasher)
        self.results[name] = Result(tokens, max_tokens)
        self.scheduler.add_request(request)
        return name

    def abort(self, name: str) -> None:
        """The client left. With a step in flight vLLM handles it before that step's output."""
        self.results[name].aborted = True
        self._aborts.append(name)
        if not self._in_flight:
            self._process_aborts()

    def _process_aborts(self) -> None:
        aborts, self._aborts = self._aborts, []
        self.scheduler.finish_requests(aborts, RequestStatus.FINISHED_ABORTED)

    # -- steps ------------------------------------------------------------------------------------------------

    def step(self, count: int = 1, settle: bool = True) -> None:
        """Turns of the engine's loop. `settle`: let the hosts work before each."""
        for _ in range(count):
            if settle:
                self.settle()
            self.turn()

    def turn(self) -> bool:
        """One turn of the engine's loop; False if it had nothing to do."""
        self.steps += 1
        executed = False
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            executed = output.total_num_scheduled_tokens > 0
            self._in_flight.append([output, None])
            if not self._async or self._eager():
                self._run_steps()
            if self._async and len(self._in_flight) < 2 and (executed or self.scheduler.has_requests()):
                return True
        elif not self._in_flight:
            return False
        output, done = self._in_flight[0]
        if done is None:
            self._run_steps(count=1)
            done = self._in_flight[0][1]
        self._in_flight.popleft()
        self._process_aborts()
        for outputs in self.scheduler.update_from_output(output, done).values():
            self._take(outputs)
        return True

    def _run_steps(self, count: int | None = None) -> None:
        """Run steps that were planned and not run yet, in order."""
        for entry in list(self._in_flight)[:count]:
            if entry[1] is None:
                entry[1] = self.executor.execute(pickle.dumps(entry[0]))

    def _take(self, outputs: Any) -> None:
        for output in outputs.outputs:
            result = self.results[output.request_id]
            result.tokens += output.new_token_ids
            if output.finish_reason is not None:
                result.reason, result.params = output.finish_reason, output.kv_transfer_params
        stats = outputs.scheduler_stats
        if stats is not None and stats.kv_connector_stats:
            self.stats.append(stats.kv_connector_stats)

    # -- waiting ----------------------------------------------------------------------------------------------

    def host(self, name: str, rank: int = 0) -> FakeProcess:
        return self.hosts.of(name, rank)

    def child(self, name: str) -> Control:
        return controls[name]

    def settle(self) -> None:
        """Wait until each link whose host is free has done its steps, and has asked its child once more."""
        deadline = time.monotonic() + PATIENCE_S
        for key, link in self.links.items():
            seen: tuple[FakeProcess, int] | None = None
            while not self._settled(key, link, seen):
                process = self.hosts.of(*key)
                if seen is None or seen[0] is not process:
                    seen = (process, process.runs)
                assert time.monotonic() < deadline, f"{key} does not settle: {link.state}"
                time.sleep(0.0002)

    def _settled(self, key: tuple[str, int], link: Any, seen: tuple[FakeProcess, int] | None) -> bool:
        process = self.hosts.of(*key)
        if process.held:
            return True
        if self._completed.get(key, -1) < self._submitted.get(key, -1):
            return False
        if link.state.value != "up" or not (link._loads or link._sends):
            return True
        return seen is not None and seen[0] is process and process.runs >= seen[1] + 2

    def until(self, true: Callable[[], bool], what: str = "it") -> None:
        """Step until something holds."""
        deadline = time.monotonic() + PATIENCE_S
        while not true():
            assert time.monotonic() < deadline, f"waited in vain for {what}"
            self.step()

    def wait_for_kv(self, name: str) -> None:
        """Step until vLLM holds the request for a load and the children have begun it."""
        self.until(lambda: self.status(name) == "WAITING_FOR_REMOTE_KVS", f"{name} to wait for its KV")
        self.step(4)

    def finish(self, *names: str) -> None:
        """Step until these requests are done."""
        self.until(lambda: not set(names) & set(self.unfinished), f"the end of {names}")

    def run(self) -> None:
        """Step until all requests are done and nothing is owed."""
        self.until(lambda: not self.unfinished and self.quiet, "the end of all requests")

    @property
    def unfinished(self) -> list[str]:
        return [n for n, r in self.results.items() if r.reason is None and not r.aborted]

    @property
    def quiet(self) -> bool:
        return self.half.quiet and not self.scheduler.has_requests() and not self._in_flight

    @property
    def stories(self) -> Any:
        """Where the tokens of the requests came from (`core.stories`)."""
        half: Any = self.half
        return half.stories if hasattr(half, "stories") else half.loads.stories

    @property
    def free_blocks(self) -> int:
        return self.pool.get_num_free_blocks()

    @property
    def used_blocks(self) -> int:
        """Blocks that are not free, the null block aside."""
        return self.free_at_start - self.free_blocks

    def status(self, name: str) -> str:
        request = self.scheduler.requests.get(name)
        return "GONE" if request is None else request.status.name

    def received(self) -> list[tuple[int, str]]:
        """(step, request) of each `finished_recving` that vLLM heard."""
        return [(heard.step, name) for heard in self.heard for name in sorted(heard.received)]

    def total(self, name: str, counter: str) -> int:
        """The sum of one of RayKV's counters of a child so far."""
        return sum(s[name]["counters"].get(counter, 0) for s in self.stats if name in s)

    # -- the end ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """What must hold after every test; the requests must be done."""
        assert not self.violations, "\n".join(self.violations)
        self.run()
        self.half.check_integrity()
        assert self.used_blocks == 0, f"{self.used_blocks} blocks were lost; pinned: {self.half._pins.pinned()}"
        for name in self.names:
            assert not controls[name].wrong, f"{name} read blocks of others: {controls[name].wrong}"
        for name, result in self.results.items():
            right = result.expected
            if result.aborted or result.reason is None or result.reason.name == "ERROR":
                right = right[: len(result.tokens)]
            assert result.tokens == right, f"{name}: wrong tokens"
        assert all(not heard.sent for heard in self.heard), "vLLM heard a finished_sending"
        self.stories.check_integrity()
        assert not self.stories.running, "stories of requests that have ended go on"
        prompts = sum(len(result.prompt) for result in self.results.values())
        assert self.stories.prompt_tokens == prompts, "tokens by source are not those of all prompts"
        assert not self.violations, "\n".join(self.violations)

    def close(self) -> None:
        for worker in getattr(self, "workers", ()):
            worker.shutdown()
        if hasattr(self, "scheduler"):
            self.scheduler.shutdown()
        self.hosts.close()
        self._monkeypatch.undo()
