"""Which children a request's loads may come from, and what is said of those that they may not come from."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from raykv.connector import vllm_compat
from raykv.connector.scheduler_child import SchedulerChild
from raykv.core.ledger import Ledger
from raykv.core.stalls import StallWatch
from raykv.engine_messages import Why
from raykv.messages import ChildIndex
from raykv.types import RequestId

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = logging.getLogger("raykv")


class LoadRights:
    """Those of one engine's requests. EngineCore's thread only.

    `may_load` and `why_not` are the same rules, the one quick, the other in words.
    """

    def __init__(self, vllm_config: Any, ledger: Ledger, stalls: StallWatch) -> None:
        self._ledger, self._stalls = ledger, stalls
        self.no_loads = vllm_compat.why_no_loads(vllm_config)
        """Why no child loads anything in this engine, if so."""
        if self.no_loads:
            logger.warning("no child loads anything: %s", self.no_loads)
        self._passed: dict[RequestId, set[ChildIndex]] = {}
        """By request: the children that would have had to load at an allocation which is over."""

    def asked(self, request: Request) -> None:
        """vLLM asks for the request's loads; one that was preempted begins again."""
        request_id = RequestId(request.request_id)
        if request_id in self._passed and vllm_compat.is_status(request, "PREEMPTED"):
            del self._passed[request_id]

    def told(self, request: RequestId, child: SchedulerChild) -> None:
        """The child heard of an allocation of the request."""
        if child.config.connector in vllm_compat.LOADS_AT_FIRST_ALLOCATION:
            self._passed.setdefault(request, set()).add(child.index)

    def forget(self, request: RequestId) -> None:
        """The request has ended."""
        self._passed.pop(request, None)

    def may_load(self, request: RequestId, child: SchedulerChild) -> bool:
        return (
            child.serves(request)
            and child.config.options.load
            and self._ledger.may_load(request, child.index)
            and child.index not in self._passed.get(request, ())
            and not self._stalls.is_withdrawn(request)
        )

    def why_not(self, request: RequestId, child: SchedulerChild) -> tuple[Why, str] | None:
        """Why the child is not asked for this request; None if it is."""
        if self.no_loads:
            return Why.NOT_ASKED, self.no_loads
        if not child.config.options.load or child.config.role == "kv_producer":
            return Why.NOT_ASKED, "it is only saved to"
        if not child.place.asked:
            return Why.CHILD_OFF, f"it is {child.place.value}"
        if not child.up:
            return Why.CHILD_OFF, f"it is {child.state.value}"
        if not child.serves(request):
            return Why.CHILD_OFF, "it was off when the request came"
        if not self._ledger.may_load(request, child.index):
            return Why.FAILED, "an earlier load of this request failed there"
        if child.index in self._passed.get(request, ()):
            return Why.NOT_ASKED, "it loads at a request's first allocation only"
        if self._stalls.is_withdrawn(request):
            return Why.NOT_ASKED, "there was no room for the load beside the running requests"
        return None
