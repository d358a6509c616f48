"""The bench of `fake_worker` whose chain of children changes while it runs."""

from __future__ import annotations

import json
from typing import Any

from raykv.engine_messages import ChainOrder, ChildOp, OrderState, Progress
from tests.support import fake_config
from tests.support.fake_children import FakeChild
from tests.support.fake_control import controls, holds
from tests.support.fake_parts import WorkerPart
from tests.support.fake_ranges import FakeRangeChild
from tests.support.fake_worker import Bench


class EndingChild(FakeChild):
    """A fake whose worker half touches no block any more once it was shut down: for one in a worker's own process."""

    def shutdown(self) -> None:
        self.control.calls["shutdown"] += 1
        if isinstance(self.part, WorkerPart):
            holds.died(self.control.name, self.part.rank, self.part.engine_id)


class EndingRangeChild(EndingChild, FakeRangeChild):
    """The same, which loads any range."""


def child(name: str, hosted: bool = True, cls: str = "EndingChild", **more: Any) -> dict[str, Any]:
    """The config of an EndingChild."""
    fields = {"kv_connector_module_path": "tests.support.chain_bench", **more.pop("fields", {})}
    return fake_config.child(name, hosted, cls, fields=fields, **more)


def ranged(name: str, hosted: bool = True, **more: Any) -> dict[str, Any]:
    return child(name, hosted, "EndingRangeChild", **more)


class ChainMixin:
    """Orders to the chain of a bench. Put it in front of the bench's class."""

    half: Any
    names: list[str]
    links: dict[tuple[str, int], Any]

    def order(self, op: ChildOp, child: str = "", number: str | None = None, **more: Any) -> str:
        """Leave an order; returns its number."""
        self.orders = [*getattr(self, "orders", []), number or f"o{len(getattr(self, 'orders', []))}"]
        self.half.chain.order(ChainOrder(self.orders[-1], op, child, **more))
        return self.orders[-1]

    def add_child(self, config: dict[str, Any], before: str = "") -> str:
        name = config["kv_connector_extra_config"]["raykv"]["name"]
        if name not in self.names:
            self.names.append(name)
        return self.order(ChildOp.ADD, name, config=json.dumps(config), before=before)

    def state(self, number: str) -> OrderState:
        return next(state for state in self.half.chain.states() if state.number == number)

    def ended(self, number: str) -> OrderState:
        """Step until the order has ended."""
        self.until(lambda: self.state(number).progress.final, f"the end of order {number}")  # type: ignore[attr-defined]
        return self.state(number)

    def done(self, number: str) -> None:
        """Step until the order was carried out."""
        state = self.ended(number)
        assert state.progress is Progress.DONE, state

    @property
    def chain(self) -> list[str]:
        """The children's names, first asked first."""
        return [child.name for child in self.half.children]

    def turn(self) -> bool:
        stepped = super().turn()  # type: ignore[misc]
        self._watch_new_links()
        return bool(stepped)

    def _watch_new_links(self) -> None:
        links = {
            (self.half.children[index].name, rank): link
            for rank, worker in enumerate(self.workers)  # type: ignore[attr-defined]
            for index, link in worker._worker_half._links.items()
        }
        for key, link in links.items():
            if self.links.get(key) is not link:
                self._watch_link(key, link)
        self.links = links

    def _watch_link(self, key: tuple[str, int], link: Any) -> None:
        submitted: dict[Any, int] = self._submitted  # type: ignore[attr-defined]
        completed: dict[Any, int] = self._completed  # type: ignore[attr-defined]
        submitted.pop(key, None), completed.pop(key, None)
        submit_inner, publish_inner = link.submit, link._publish

        def submit(record: Any, *args: Any) -> None:
            submitted[key] = record.step
            submit_inner(record, *args)

        def publish(events: Any, objects: Any, done: Any) -> None:
            publish_inner(events, objects, done)
            if done is not None:
                completed[key] = max(done, completed.get(key, -1))

        link.submit, link._publish = submit, publish


class ChainBench(ChainMixin, Bench):
    """`Bench` with orders; at its end each order must have ended."""

    def check(self) -> None:
        for number in getattr(self, "orders", []):
            if any(state.number == number for state in self.half.chain.states()):
                self.ended(number)
        self.names = [name for name in self.names if name in controls]  # some were never made
        super().check()
        assert not self.half.chain.busy
