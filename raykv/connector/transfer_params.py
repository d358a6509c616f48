"""`kv_transfer_params`, kept apart by child.

Connectors edit a request's parameters in place (NIXL sets `do_remote_prefill` to False when it has taken
them), so each child works on a copy of its own. What a child returns at a request's end goes back under its
plain keys; if two children return the same key, the first one keeps it and the others' stand under
`raykv.<child>`, where this class finds them again when the parameters come back with another request.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from raykv.connector.request_stories import without_own
from raykv.messages import ChildIndex
from raykv.types import RequestId

logger = logging.getLogger("raykv")
OWN_KEY = "raykv"
_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()


class _Swapped:
    """These requests have these parameters meanwhile, whatever is done to the attribute. A plain loop, since it runs
    for each child in each step."""

    __slots__ = ("_original", "_params")

    def __init__(self, params: Sequence[tuple[Any, dict[str, Any] | None]]) -> None:
        self._params = params

    def __enter__(self) -> None:
        self._original = [request.kv_transfer_params for request, _ in self._params]
        for request, own in self._params:
            request.kv_transfer_params = own

    def __exit__(self, *error: object) -> None:
        for (request, _), original in zip(self._params, self._original, strict=True):
            request.kv_transfer_params = original


class ChildParams:
    """The parameters of the living requests that have any."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = dict(enumerate(names))
        self._requests: dict[RequestId, Any] = {}
        self._params: dict[RequestId, dict[ChildIndex, dict[str, Any] | None]] = {}
        self._ended: list[RequestId] = []

    def joined(self, child: ChildIndex, name: str) -> None:
        """A child was added: requests that arrive from here on have a copy for it."""
        self._names[child] = name

    def left(self, child: ChildIndex) -> None:
        """The child is gone."""
        self._names.pop(child, None)

    def add(self, request: Any) -> None:
        """A request arrived: make each child its copy."""
        params = request.kv_transfer_params
        if params is None:
            return
        request_id = RequestId(request.request_id)
        shared = {key: value for key, value in without_own(params).items() if key != OWN_KEY}
        own = params.get(OWN_KEY) or {}
        copies: dict[ChildIndex, dict[str, Any] | None] = {}
        for child, name in self._names.items():
            mine = own.get(name) if isinstance(own, dict) else None
            found = copy.deepcopy(shared) | copy.deepcopy(mine if isinstance(mine, dict) else {})
            copies[child] = found if found or not params else None  # None: there is nothing for any child
        self._requests[request_id] = request
        self._params[request_id] = copies

    def of(self, child: ChildIndex, request: Any) -> AbstractContextManager[None]:
        """While a child is called about this request."""
        params = self._params.get(request.request_id, {})
        return _Swapped([(request, params[child])]) if child in params else _NOTHING

    def of_all(self, child: ChildIndex) -> AbstractContextManager[None]:
        """While a child is called about any of its requests."""
        if not self._requests:
            return _NOTHING
        params = self._params
        mine = [
            (request, params[request_id][child])
            for request_id, request in self._requests.items()
            if child in params[request_id]  # else the child is younger, and not called about this one
        ]
        return _Swapped(mine)

    def end(self, request: Any) -> None:
        """The request ended; children may still look at it in the step that tells the workers."""
        if request.request_id in self._params:
            self._ended.append(request.request_id)

    def forget_ended(self) -> None:
        """A step was planned."""
        for request_id in self._ended:
            self._params.pop(request_id, None)
            self._requests.pop(request_id, None)
        self._ended = []


def merge_returned(returned: Sequence[tuple[str, dict[str, Any] | None]]) -> dict[str, Any] | None:
    """One dict of what the children returned: `{x}` and `{y}` give `{x, y}`; a clash never ends the engine."""
    merged: dict[str, Any] = {}
    apart: dict[str, dict[str, Any]] = {}
    given = False
    for name, params in returned:
        if params is None:
            continue
        given = True
        clashes = [key for key in params if key in merged and merged[key] != params[key]]
        if clashes:
            logger.warning(
                "child %s returned kv_transfer_params %s, which an earlier child had set; they are kept under %s.%s",
                name,
                clashes,
                OWN_KEY,
                name,
            )
            apart[name] = params
            params = {key: value for key, value in params.items() if key not in clashes}
        merged.update(params)
    if apart:
        merged[OWN_KEY] = {**merged.get(OWN_KEY, {}), **apart}
    return merged if given else None
