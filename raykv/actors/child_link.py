"""The worker's end of one hosted child: a queue in front, a Ray actor behind, and a thread between.

The worker puts records on the queue and never waits, except for a synchronous load. The thread owns the host:
it sends what has gathered as one call at a time, keeps deadlines (Ray never notices a stopped process), kills
by pidfd, turns death into settled work, and starts the next incarnation.

    STARTING --host registered--> UP --died, hung or faulty--> DOWN --pause over--> STARTING
        \\--start failed--> DOWN                                \\--close--> CLOSED

One state machine of one thread, so one file, longer than others. What it is made of is in `link_parts`.

A record is run only by the incarnation it was planned for, and only while the link is UP; every other record
is *refused*: its loads have failed, its step is completed, since nothing will ever touch its blocks.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from raykv.actors.link_parts import Host, Item, LinkOptions, LinkOutput, LinkState, bounded_call
from raykv.core.faults import FaultWindow
from raykv.core.open_loads import OpenLoads
from raykv.errors import RayKVError
from raykv.messages import (
    NO_ATTEMPT,
    ChildEvent,
    ChildIndex,
    EventKind,
    HostReport,
    Phase,
    StepRecord,
)
from raykv.types import Incarnation, Rank, RequestId, StepId

logger = logging.getLogger("raykv")

IDLE_CHECK_S = 0.25
"""How often an idle link looks whether its host still lives (a pidfd poll, microseconds)."""
MAX_BATCH = 32
TRY_AGAIN_S = 1.0
"""The pause before a failed start or kill is tried again, or `retry_s` where that is less."""
LOAD_POLL_S, SEND_POLL_S = 0.002, 0.02
"""How long a call may wait in the host for a completion: short while a load is open, since a request waits."""


class ChildLink:
    """One child on one rank. Public methods: the worker's thread. The rest: the link's thread."""

    def __init__(
        self,
        *,
        name: str,
        child: ChildIndex,
        rank: Rank,
        options: LinkOptions,
        start_host: Callable[[Incarnation], Host],
        after_death: Callable[[Sequence[StepRecord]], None] = lambda records: None,
    ) -> None:
        """`start_host` blocks until the host of that incarnation is built and registered, or raises."""
        self.name, self.child, self.rank = name, child, rank
        self._options = options
        self._start_host = start_host
        self._after_death = after_death
        self._queue: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._faults = FaultWindow(options.max_faults, options.fault_window_s, options.retry_s, options.max_retry_s)
        self._lock = threading.Lock()
        self._output = LinkOutput()
        self._host: Host | None = None
        self._started: deque[tuple[Incarnation, Host | BaseException]] = deque()
        self._held: list[Item] = []  # taken for the host, and their end not known
        self._refused: StepId | None = None
        self._load_phase: StepRecord | None = None  # its step's SAVE record is still to come
        self._loads = OpenLoads()
        self._sends: set[RequestId] = set()
        self._restart_at = 0.0
        self._retire: Incarnation | None = None
        self._why = ""
        self.state = LinkState.STARTING
        self.incarnation = Incarnation(0)
        self.has_output = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"raykv-{name}", daemon=True)

    # -- the worker's thread --------------------------------------------------------------------------------

    def start(self, host: Host) -> None:
        """Begin with the first incarnation's host, already registered."""
        self._host, self.state = host, LinkState.UP
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """The host's process; None while there is none that works."""
        host = self._host
        return host.pid if host is not None and self.state is LinkState.UP else None

    def submit(self, record: StepRecord, incarnation: Incarnation, owed: tuple[RequestId, ...] = ()) -> None:
        """Hand over a record planned for `incarnation`; a few microseconds, never blocks."""
        self._queue.put(Item(record, incarnation, record.loads, owed))

    def load_now(self, record: StepRecord, incarnation: Incarnation) -> bool:
        """Run a synchronous load before the forward pass. True: every byte is in place. False: it failed, and
        nothing writes any more. Blocks for the child's time limit at most (plus the kill that settles it)."""
        item = Item(record, incarnation, done=threading.Event())
        self._queue.put(item)
        assert item.done is not None
        # The link answers within its own limits; it can only fail to if its thread has died.
        while not item.done.wait(1.0):
            if not self._thread.is_alive():
                raise RayKVError(f"the link of child {self.name} has ended; no load can be settled")
        return not item.failed

    def drain(self) -> LinkOutput:
        """What happened since the last call."""
        with self._lock:
            output, self._output = self._output, LinkOutput()
            self.has_output = False
        return output

    def retire(self, incarnation: Incarnation) -> None:
        """End the host of this incarnation, if it is still the one: its death settles what it holds, and a new
        incarnation follows."""
        self._retire = incarnation
        self._queue.put(Item(None, incarnation))

    def close(self, timeout: float = 5.0) -> None:
        """End the host and the thread. Idempotent."""
        with self._lock:
            self._closed.set()
        self._queue.put(Item(None, self.incarnation))
        self._join(timeout)
        host, self._host = self._host, None
        try:
            if host is not None:
                host.close()
        finally:
            self._join(timeout)  # a thread that waited for a call has its answer by now
            self.state = LinkState.CLOSED
            while self._started:
                _, late = self._started.popleft()
                if not isinstance(late, BaseException):
                    late.close()

    def _join(self, timeout: float) -> None:
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    # -- the link's thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._turn()
            except Exception as error:
                logger.exception("link of child %s", self.name)
                self._lose(f"its link failed: {error}")
        self.state = LinkState.CLOSED

    def _turn(self) -> None:
        if self.state is not LinkState.UP:
            self._bring_up()
        for item in self._gather():
            if item.record is None:
                continue
            if self.state is LinkState.UP and item.incarnation == self.incarnation:
                self._held.append(item)
                self._loads.begin(item.order, time.monotonic() + self._options.load_timeout_s)
                self._sends.update(item.owed)
            else:
                self._refuse(item)
        if self.state is LinkState.UP:
            self._serve()
        if self._refused is not None and not self._held:
            self._publish([], [], self._refused)
            self._refused = None

    def _serve(self) -> None:
        assert self._host is not None
        if not self._host.alive():
            self._lose("its process ended")
        elif self._retire == self.incarnation:
            self._lose("it was told to start again")
        elif self._held or self._loads or self._sends:
            self._exchange(self._host)

    def _gather(self) -> list[Item]:
        """The records that wait; blocks for the first one unless the host has something open."""
        open_work = self.state is LinkState.UP and (self._loads or self._sends)
        items = []
        try:
            items.append(self._queue.get(timeout=0.0005 if open_work else IDLE_CHECK_S))
            while len(items) < MAX_BATCH and items[-1].done is None:
                items.append(self._queue.get_nowait())
        except queue.Empty:
            pass
        return items

    def _exchange(self, host: Host) -> None:
        """One call: run what is held, take the report."""
        records = self._records()
        immediate = any(item.done is not None for item in self._held)
        wait_s = 0.0 if immediate else LOAD_POLL_S if self._loads else SEND_POLL_S if self._sends else 0.0
        try:
            report = bounded_call(host, records, wait_s, self._options.timeout_s)
        except RayKVError as error:
            self._lose(str(error))
            return
        why = self._take(report)
        if why is not None:
            self._lose(why)
            return
        if records:
            self._load_phase = records[-1] if records[-1].phase is Phase.LOAD else None
        overdue = self._loads.overdue(time.monotonic())
        if overdue is not None:
            limit = self._options.load_timeout_s
            self._lose(f"its load of request {overdue} took longer than load_timeout_s={limit:g}")

    def _records(self) -> list[StepRecord]:
        """What is held, but of idle records only one that is the last."""
        records = [item.record for item in self._held if item.record is not None]
        return [record for i, record in enumerate(records) if not record.idle or i == len(records) - 1]

    def _take(self, report: HostReport) -> str | None:
        """Turn a report into events. Returns why the host has to go, if so."""
        events = [
            self._event(kind, request, attempt)
            for kind, request, attempt in self._loads.end(report.receiving, report.failed, report.invalid_blocks)
        ]
        for request in report.sending:
            self._sends.discard(request)
            events.append(self._event(EventKind.SEND_DONE, request))
        events += [self._event(EventKind.SEND_UNASKED, request) for request in report.unasked]
        for fault in report.faults:
            events.append(self._event(EventKind.FAULT, detail=f"{fault.hook}: {fault.message}"))
        unsettled = [fault for fault in report.faults if fault.unsettled]
        verdicts = [self._faults.fault(time.monotonic()) for _ in report.faults if not unsettled]
        self._publish(events, report.objects, None if unsettled else report.done_step)
        if unsettled:
            return f"it raised in {unsettled[0].hook}: {unsettled[0].message}"
        if verdicts and verdicts[-1].off:
            return f"it raised {self._options.max_faults} times: {report.faults[-1].message}"
        held, self._held = self._held, []
        for item in held:
            item.answer(failed=bool(report.faults or report.invalid_blocks))
        return None

    # -- loss and return ------------------------------------------------------------------------------------

    def _lose(self, why: str) -> None:
        """The host is dead or must be: kill it, settle by its death, plan its return."""
        host = self._host
        self.state, self._retire, self._why = LinkState.DOWN, None, why
        if host is not None:
            try:
                host.kill()
            except Exception:
                # Not confirmed, so nothing is settled and no memory is handed on. Try again, for ever.
                logger.exception("child %s: its host (pid %s) could not be killed", self.name, host.pid)
                self._closed.wait(min(TRY_AGAIN_S, self._options.retry_s))
                return
        self._host = None
        verdict = self._faults.fault(time.monotonic())
        self._restart_at = time.monotonic() + verdict.pause_s
        logger.warning(
            "child %s (rank %d) lost its host, pid %s: %s. Its loads are recomputed; %s.",
            self.name,
            self.rank,
            host.pid if host else "?",
            why,
            f"switched off for {verdict.pause_s:g} s" if verdict.off else "it is being restarted",
        )
        records = self._records()
        before = [self._load_phase] if self._load_phase is not None else []
        try:
            # A SAVE record carries no metadata: that came with the step's LOAD record.
            self._after_death([*before, *records])
        except Exception:
            logger.exception("cleaning up after child %s", self.name)
        events = [self._event(kind, request, attempt) for kind, request, attempt in self._loads.lose()]
        events.append(self._event(EventKind.DOWN, detail=why))
        self._sends.clear()
        self._publish(events, [], max((record.step for record in records), default=None))
        held, self._held, self._load_phase = self._held, [], None
        for item in held:
            item.answer(failed=True)

    def _bring_up(self) -> None:
        if self.state is LinkState.DOWN and self._host is not None:
            self._lose(self._why)
        elif self.state is LinkState.DOWN and time.monotonic() >= self._restart_at:
            self.state = LinkState.STARTING
            incarnation = Incarnation(self.incarnation + 1)
            threading.Thread(
                target=self._start, args=(incarnation,), name=f"raykv-start-{self.name}", daemon=True
            ).start()
        elif self._started:
            incarnation, host = self._started.popleft()
            if isinstance(host, BaseException):
                verdict = self._faults.fault(time.monotonic())
                pause = max(verdict.pause_s, min(TRY_AGAIN_S, self._options.retry_s))
                logger.warning("child %s could not be restarted (%s); next try in %g s", self.name, host, pause)
                self._restart_at = time.monotonic() + pause
                self.state = LinkState.DOWN
            else:
                self._host, self.incarnation, self.state = host, incarnation, LinkState.UP
                logger.info("child %s (rank %d) is back, pid %d", self.name, self.rank, host.pid)
                self._publish([], [], None)

    def _start(self, incarnation: Incarnation) -> None:
        try:
            host: Host | BaseException = self._start_host(incarnation)
        except BaseException as error:
            host = error
        with self._lock:
            closed = self._closed.is_set()
            if not closed:
                self._started.append((incarnation, host))
        if not closed:
            self._queue.put(Item(None, incarnation))
        elif not isinstance(host, BaseException):
            host.close()

    def _refuse(self, item: Item) -> None:
        """It never reaches a host. Its step counts as completed once all steps before it are."""
        assert item.record is not None
        events = [
            ChildEvent(EventKind.RECV_FAILED, self.child, self.rank, item.incarnation, o.request, o.attempt)
            for o in item.order
        ]
        self._publish(events, [], None)
        self._refused = item.record.step
        item.answer(failed=True)

    # -- output ---------------------------------------------------------------------------------------------

    def _event(
        self, kind: EventKind, request: RequestId | None = None, attempt: int = NO_ATTEMPT, detail: str = ""
    ) -> ChildEvent:
        return ChildEvent(kind, self.child, self.rank, self.incarnation, request, attempt, detail)  # type: ignore[arg-type]

    def _publish(self, events: Sequence[ChildEvent], objects: Sequence[bytes], done: StepId | None) -> None:
        with self._lock:
            self._output.events.extend(events)
            self._output.objects.extend(objects)
            if done is not None:
                self._output.done_step = max(done, self._output.done_step or done)
            self.has_output = True
