"""The ledger of owed completions: what each child owes for each request, on each rank.

The theory. A *load* is opened when vLLM allocates blocks for tokens that a child promised, and vLLM then holds
the request until it hears `finished_recving` for it, exactly once. A load has one *share* for each child that takes
part; a share that failed spoils the load, which still ends only with its last share: the others write until then.
A *send* is opened when a request ends and a child says that it still reads the blocks. Shares and sends are owed by
every rank, and each rank settles its part by a report of the current attempt and incarnation, or by the confirmed
death of the process that held it:

    load:   OPEN --each share settled on each rank, all well--> TELL  (finished_recving)      --> gone
            OPEN --..., one failed----------------------------> ECHO  (failed_recving)        --> gone when echoed
            OPEN --..., one failed, others may have it--------> RETRY --> OPEN (a new attempt) or ECHO
            OPEN, RETRY --..., the request was aborted--------> TELL  (vLLM keeps the blocks until then)
    send:   OPEN --each rank settled------------------> gone, its pins are given back

Failures go by echo because vLLM reads `failed_recving` before it calls the connector: the scheduler half asks
all ranks, in the next step's metadata, to report the request as failed and as finished in one output.
What matches no open entry is counted by reason and dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence, Set

from raykv.core.ledger_entries import Drop, Load, LoadState, Send, Settled, Share
from raykv.errors import IntegrityError
from raykv.messages import NO_ATTEMPT, ChildEvent, ChildIndex, EventKind
from raykv.types import Attempt, Incarnation, Rank, RequestId

__all__ = ["Drop", "Ledger", "LoadState", "Settled"]


def _never(request: RequestId, failed: Set[ChildIndex]) -> bool:
    return False


class Ledger:
    """One engine's ledger, over all ranks. One thread: the scheduler's."""

    def __init__(self, num_ranks: int) -> None:
        self._ranks = frozenset(Rank(r) for r in range(num_ranks))
        self._loads: dict[RequestId, Load] = {}
        self._sends: dict[tuple[RequestId, ChildIndex], list[Send]] = {}
        self._attempts: dict[RequestId, Attempt] = {}
        self._failed_on: dict[RequestId, set[ChildIndex]] = {}
        self._alive: set[RequestId] = set()
        self._loading: Counter[ChildIndex] = Counter()
        self.dropped: Counter[tuple[ChildIndex, Drop]] = Counter()
        self.failures: Counter[ChildIndex] = Counter()

    # -- a request's life -----------------------------------------------------------------------------------

    def request_arrived(self, request: RequestId) -> None:
        """vLLM has the request from now on."""
        self._alive.add(request)

    def request_ended(self, request: RequestId) -> None:
        """The request finished or was aborted. Its open load, if any, is now owed to vLLM as a plain end."""
        self._alive.discard(request)
        self._attempts.pop(request, None)
        self._failed_on.pop(request, None)
        load = self._loads.get(request)
        if load is not None:
            load.aborted = True

    def may_load(self, request: RequestId, child: ChildIndex) -> bool:
        """False once a load of this request from this child has failed: so it can't loop."""
        return child not in self._failed_on.get(request, ())

    # -- opening --------------------------------------------------------------------------------------------

    def open_load(self, request: RequestId, *children: ChildIndex) -> Attempt:
        """An asynchronous load of these children begins. Raises IntegrityError if the request already has one."""
        if request in self._loads:
            raise IntegrityError(f"request {request} already has a load in flight")
        if not children or len(set(children)) != len(children):
            raise IntegrityError(f"a load of request {request} by the children {children}")
        self._loads[request] = Load(NO_ATTEMPT, {})
        return self._attempt(request, children)

    def _attempt(self, request: RequestId, children: Sequence[ChildIndex]) -> Attempt:
        attempt = Attempt(self._attempts.get(request, NO_ATTEMPT) + 1)
        load = self._loads[request]
        self._attempts[request] = load.attempt = attempt
        load.shares = {child: Share(set(self._ranks)) for child in children}
        self._loading.update(children)
        return attempt

    def retry(self, request: RequestId, child: ChildIndex) -> Attempt | None:
        """This child loads what is missing of a load in RETRY. None if there is no such load: it was aborted."""
        load = self._loads.get(request)
        if load is None or load.state is not LoadState.RETRY or load.aborted:
            return None
        load.well |= {child for child, share in load.shares.items() if not share.failed}
        load.state = LoadState.OPEN
        return self._attempt(request, [child])

    def give_up(self, request: RequestId) -> bool:
        """Nobody else has it: whether the ranks are to report the load in RETRY as failed; not when it was aborted."""
        load = self._loads.get(request)
        if load is None or load.state is not LoadState.RETRY or load.aborted:
            return False
        load.state = LoadState.ECHO
        return True

    def open_send(
        self, request: RequestId, child: ChildIndex, incarnations: tuple[Incarnation, ...], now: float
    ) -> None:
        """The child reads the ended request's blocks until it reports, on every rank."""
        self._sends.setdefault((request, child), []).append(Send(incarnations, set(self._ranks), now))

    # -- reports --------------------------------------------------------------------------------------------

    def apply(
        self, events: Sequence[ChildEvent], may_retry: Callable[[RequestId, Set[ChildIndex]], bool] = _never
    ) -> Settled:
        """Take the reports of one step. Reports of one step may come in any order.

        `may_retry`: whether a load that these children failed may go into RETRY; it is in `settled.retry` then."""
        settled = Settled()
        for event in events:
            _HANDLERS[event.kind](self, event, settled)
        for request in [r for r, load in self._loads.items() if load.state is LoadState.RETRY and load.aborted]:
            del self._loads[request]
            settled.tell.add(request)
        for request in sorted(settled.echo):
            failed = self.failed_shares(request)
            if may_retry(request, failed):
                self._loads[request].state = LoadState.RETRY
                settled.retry[request] = failed
        settled.echo -= settled.retry.keys()
        return settled

    def _recv(self, event: ChildEvent, settled: Settled) -> None:
        load = self._loads.get(event.request) if event.request is not None else None
        share = load.shares.get(event.child) if load is not None and load.state is LoadState.OPEN else None
        if load is None or share is None:
            self._drop(event, Drop.UNKNOWN)
        elif event.attempt != load.attempt:
            self._drop(event, Drop.LATE)
        elif event.rank not in share.waiting:
            self._drop(event, Drop.UNKNOWN)
        else:
            assert event.request is not None
            share.failed |= event.kind is EventKind.RECV_FAILED
            share.waiting.discard(event.rank)
            if not share.waiting:
                self._close_share(event.request, event.child, load, settled)

    def _close_share(self, request: RequestId, child: ChildIndex, load: Load, settled: Settled) -> None:
        settled.ended.append((request, child))
        self._loading[child] -= 1
        if load.shares[child].failed:
            self.failures[child] += 1
            if not load.aborted:
                self._failed_on.setdefault(request, set()).add(child)
        else:
            settled.well.add((request, child))
        if load.is_settled:
            self._close_load(request, load, settled)

    def _close_load(self, request: RequestId, load: Load, settled: Settled) -> None:
        if load.failed and not load.aborted:
            load.state = LoadState.ECHO
            settled.echo.add(request)
            return
        if not load.failed:
            settled.loaded += [(request, child) for child in sorted(load.well | load.shares.keys())]
        del self._loads[request]
        settled.tell.add(request)

    def _sync_failed(self, event: ChildEvent, settled: Settled) -> None:
        if event.request in self._alive:
            assert event.request is not None
            failed = self._failed_on.setdefault(event.request, set())
            if event.child not in failed:
                failed.add(event.child)
                self.failures[event.child] += 1

    def echoed(self, requests: set[RequestId]) -> set[RequestId]:
        """The ranks reported these as failed and finished; returns those that vLLM may hear, once each."""
        heard = set()
        for request in requests:
            load = self._loads.get(request)
            if load is not None and load.state is LoadState.ECHO:
                del self._loads[request]
                heard.add(request)
        return heard

    def _send(self, event: ChildEvent, settled: Settled) -> None:
        assert event.request is not None
        for send in self._sends.get((event.request, event.child), ()):
            if event.rank in send.waiting:
                if event.incarnation != send.incarnations[event.rank]:
                    self._drop(event, Drop.LATE)
                else:
                    self._settle_send(event.request, event.child, send, event.rank, settled)
                return
        self._drop(event, Drop.UNKNOWN)

    def _send_unasked(self, event: ChildEvent, settled: Settled) -> None:
        """Also when the send has been opened meanwhile: the child said so before it could know of it."""
        self._drop(event, Drop.UNKNOWN)

    def _settle_send(self, request: RequestId, child: ChildIndex, send: Send, rank: Rank, settled: Settled) -> None:
        send.waiting.discard(rank)
        if not send.waiting:
            sends = self._sends[(request, child)]
            sends.remove(send)
            if not sends:
                del self._sends[(request, child)]
            settled.sends.add((request, child))

    def _down(self, event: ChildEvent, settled: Settled) -> None:
        """Confirmed death of a rank's process: it settles the rank's share of all that it held.

        Loads are settled one by one by the reports of the worker, which knows what it handed over; a send is
        known here only.
        """
        for (request, child), sends in list(self._sends.items()):
            if child != event.child:
                continue
            for send in list(sends):
                if event.rank in send.waiting and send.incarnations[event.rank] <= event.incarnation:
                    self._settle_send(request, child, send, event.rank, settled)

    def _fault(self, event: ChildEvent, settled: Settled) -> None:
        self.failures[event.child] += 1

    def _drop(self, event: ChildEvent, reason: Drop) -> None:
        self.dropped[(event.child, reason)] += 1

    # -- time and questions ---------------------------------------------------------------------------------

    def overdue(self, now: float, limit_s: Callable[[ChildIndex], float]) -> set[ChildIndex]:
        """Children that broke a promise: a send is open for longer than the child's limit."""
        return {
            child
            for (_, child), sends in self._sends.items()
            if any(now - send.opened_at > limit_s(child) for send in sends)
        }

    def is_loading(self, child: ChildIndex) -> bool:
        """Whether a rank still owes this child's load of any request."""
        return self._loading[child] > 0

    def owes(self, child: ChildIndex) -> bool:
        """Whether a rank still owes a load or a send of this child, of any request."""
        return self.is_loading(child) or any(sender == child for _, sender in self._sends)

    def failed_shares(self, request: RequestId) -> set[ChildIndex]:
        """The children that failed in the last attempt of an open load."""
        load = self._loads.get(request)
        return {child for child, share in load.shares.items() if share.failed} if load is not None else set()

    def load_of(self, request: RequestId) -> Load | None:
        """The open load of a request, for tests and checks."""
        return self._loads.get(request)

    @property
    def unsettled_loads(self) -> int:
        """Loads that vLLM waits for."""
        return len(self._loads)

    @property
    def unsettled(self) -> int:
        """Entries that still wait for a rank or an echo."""
        return len(self._loads) + sum(len(sends) for sends in self._sends.values())

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every entry waits for something."""
        for request, load in self._loads.items():
            if (load.state is LoadState.OPEN) == load.is_settled:
                raise IntegrityError(f"load of {request} is {load.state} and waits for {load.shares}")
        loading = Counter(
            child for load in self._loads.values() for child, share in load.shares.items() if share.waiting
        )
        if loading != +self._loading:
            raise IntegrityError(f"open loads by child are {loading}, counted as {self._loading}")
        for key, sends in self._sends.items():
            if not sends or any(not send.waiting for send in sends):
                raise IntegrityError(f"send {key} waits for nothing")


_HANDLERS: dict[EventKind, Callable[[Ledger, ChildEvent, Settled], None]] = {
    EventKind.RECV_DONE: Ledger._recv,
    EventKind.RECV_FAILED: Ledger._recv,
    EventKind.SEND_DONE: Ledger._send,
    EventKind.SEND_UNASKED: Ledger._send_unasked,
    EventKind.SYNC_FAILED: Ledger._sync_failed,
    EventKind.DOWN: Ledger._down,
    EventKind.FAULT: Ledger._fault,
}
