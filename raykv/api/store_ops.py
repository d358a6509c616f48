"""What is done at stores: at all of those chosen, each with the same number; and how long operations are followed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from raykv.admin_messages import Done, Operation, OperationState
from raykv.api.asking import ask, ask_until, at_all, why
from raykv.api.errors import NotDoneError, OperationError
from raykv.api.objects import Store
from raykv.api.reach import Caller
from raykv.api.results import Outcome, Part, Progress, Tell
from raykv.api.words import count, show_nbytes
from raykv.errors import HostDied, HostTimeout, RayKVError

POLL_S = 0.1
POLL_MAX_S = 1.0
CHANGE_S = 60.0
"""To forget all of a large store takes seconds, the files of a shared folder longer."""


class StoreOps:
    """Any thread. `timeout`: seconds for one call."""

    def __init__(self, callers: Mapping[str, Caller], timeout: float) -> None:
        self._callers, self._timeout = callers, timeout

    def at_once(
        self, what: str, number: str, stores: Sequence[Store], method: str, args: Callable[[Store], tuple[Any, ...]]
    ) -> Outcome:
        """An operation that ends in its call. Raises OperationError if no store did it."""
        by_actor = {store.actor: store for store in stores}

        def one(actor: str) -> Done:
            limit = max(self._timeout, CHANGE_S)
            return cast(Done, ask_until(self._callers[actor], method, *args(by_actor[actor]), timeout=limit))

        done, errors = at_all(one, by_actor)
        parts = [Part(by_actor[actor].at, it.said, it.blocks, it.nbytes) for actor, it in done.items()]
        parts += [Part(by_actor[actor].at, error=problem) for actor, problem in errors.items()]
        if not done:
            raise _none_did(what, errors, by_actor)
        return Outcome(what, _summed(what, parts), number, tuple(parts))

    def follow(
        self,
        what: str,
        operations: Mapping[str, Operation],
        stores: Sequence[Store],
        wait_s: float,
        tell: Tell | None,
    ) -> Outcome:
        """Begin one at each store, and stay with them until they have ended or `wait_s` is over; 0: only begin them.

        Raises OperationError if the first refuses it (then none has begun), or if all do.
        """
        by_actor = {store.actor: store for store in stores}
        deadline = time.monotonic() + wait_s
        states: dict[str, OperationState] = {}
        errors: dict[str, str] = {}
        for actor in by_actor:  # one after the other: what the first refuses is begun nowhere
            try:
                states[actor] = self._ask(actor, "begin", operations[actor])
            except RayKVError as error:
                if not states:
                    raise _none_did(what, {actor: why(error)}, by_actor) from error
                errors[actor] = why(error)
        pause = POLL_S
        told: dict[str, OperationState] = {}
        while True:
            _report(what, by_actor, states, told, tell)
            open_ = [actor for actor, state in states.items() if state.running]
            if not open_ or time.monotonic() + pause > deadline:
                break
            time.sleep(pause)
            pause = min(pause * 1.5, POLL_MAX_S)
            for actor in open_:
                self._again(actor, operations[actor], states, errors)
        parts = [_part(by_actor[actor].at, state, errors.get(actor, "")) for actor, state in states.items()]
        parts += [Part(by_actor[a].at, error=problem) for a, problem in errors.items() if a not in states]
        number = next(iter(operations.values())).number if operations else ""
        outcome = Outcome(what, _summed(what, parts), number, tuple(parts))
        failed = [part for part in parts if part.error]
        if failed and len(failed) == len(parts):
            raise NotDoneError(f"{failed[0].where}: {failed[0].error}")
        return outcome

    def _again(
        self, actor: str, operation: Operation, states: dict[str, OperationState], errors: dict[str, str]
    ) -> None:
        """Look at one that runs. A store that was restarted meanwhile knows nothing of it, and is told again."""
        try:
            try:
                states[actor] = ask(self._callers[actor], "operation", operation.number, timeout=self._timeout)
            except (OperationError, HostDied):
                states[actor] = self._ask(actor, "begin", operation)
            errors.pop(actor, None)
        except HostTimeout:
            pass  # it is busy; looked at again until the time is up
        except RayKVError as error:
            errors[actor] = why(error)
            state = states[actor]
            states[actor] = OperationState(
                state.number, state.kind, state.done, state.total, False, state.began, time.time()
            )

    def _ask(self, actor: str, method: str, *args: Any) -> Any:
        return ask_until(self._callers[actor], method, *args, timeout=self._timeout)


def _report(
    what: str,
    by_actor: Mapping[str, Store],
    states: Mapping[str, OperationState],
    told: dict[str, OperationState],
    tell: Tell | None,
) -> None:
    """Tell what is new."""
    for actor, state in states.items():
        if tell is not None and told.get(actor) != state:
            told[actor] = state
            detail = state.error or state.result
            tell(Progress(what, by_actor[actor].at, state.done, state.total, detail, not state.running))


def _part(where: str, state: OperationState, problem: str) -> Part:
    if state.running:
        said = f"goes on: {state.done:,} of {count(state.total, 'block')}"
        return Part(where, said, state.done, running=True)
    return Part(where, state.result, state.done, error=problem or state.error)


def _summed(what: str, parts: Sequence[Part]) -> str:
    """One sentence for all places."""
    good = [part for part in parts if not part.error and not part.running]
    if len(parts) == 1 and good:
        return f"{parts[0].where}: {parts[0].said}" if parts[0].said else f"{what} is done at {parts[0].where}."
    blocks, nbytes = sum(part.blocks for part in good), sum(part.nbytes for part in good)
    figures = f": {count(blocks, 'block')}" + (f", {show_nbytes(nbytes)}" if nbytes else "") if good else ""
    said = f"{what} is done at {len(good)} of {count(len(parts), 'store')}{figures}."
    running = [part.where for part in parts if part.running]
    if running:
        said += f" It goes on at {', '.join(running)}."
    failed = [f"{part.where} ({part.error})" for part in parts if part.error]
    return said + (f" Not at {'; '.join(failed)}" if failed else "")


def _none_did(what: str, errors: Mapping[str, str], by_actor: Mapping[str, Store]) -> OperationError:
    actor, problem = next(iter(errors.items()))
    more = f" (and {len(errors) - 1} other stores)" if len(errors) > 1 else ""
    return OperationError(f"{by_actor[actor].at}{more}: {problem}")
