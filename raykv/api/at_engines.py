"""Operations on the chain of a running engine: its children, without a restart. A part of `Cluster`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raykv.api import chains
from raykv.api.checked import operation
from raykv.api.connection import Connection, new_number
from raykv.api.objects import Engine
from raykv.api.results import Outcome, Tell
from raykv.api.words import seconds
from raykv.config.reader import show
from raykv.engine_messages import ChainOrder, ChildOp
from raykv.errors import ConfigError

CHANGE_S = 180.0
"""What a removed child still owes is settled first, and a new host takes its time to start."""


class AtEngines(Connection):
    """`engine` is an engine's id, the first letters of it, its host or its model; None: the only one there is.

    Each change happens between two steps, in the scheduler and in every rank at the same one; requests go on. Waits
    for `wait_s` seconds at most (0: not at all); an outcome that is `running` goes on, and the same call with its
    `number` waits again.
    """

    @operation
    def add_child(
        self,
        config: Mapping[str, Any] | str,
        *,
        engine: str | None = None,
        before: str = "",
        wait_s: float = CHANGE_S,
        tell: Tell | None = None,
        number: str | None = None,
    ) -> Outcome:
        """Add a child: an entry as in the `connectors` list (an object or its JSON); in front of `before`, or last."""
        chosen = new_number("add", number)
        return self._changed(engine, lambda of: chains.add_order(chosen, of, config, before, number is not None),
                             wait_s, tell)  # fmt: skip

    @operation
    def remove_child(
        self,
        child: str,
        *,
        engine: str | None = None,
        wait_s: float = CHANGE_S,
        tell: Tell | None = None,
        number: str | None = None,
    ) -> Outcome:
        """Take a child out. What it still loads, saves or sends is settled first; its hosts end."""
        return self._one(ChildOp.REMOVE, child, engine, wait_s, tell, number)

    @operation
    def pause_child(
        self,
        child: str,
        *,
        engine: str | None = None,
        wait_s: float = CHANGE_S,
        tell: Tell | None = None,
        number: str | None = None,
    ) -> Outcome:
        """Ask a child for nothing new and save nothing to it, until `resume_child`; its hosts stay."""
        return self._one(ChildOp.PAUSE, child, engine, wait_s, tell, number)

    @operation
    def resume_child(
        self,
        child: str,
        *,
        engine: str | None = None,
        wait_s: float = CHANGE_S,
        tell: Tell | None = None,
        number: str | None = None,
    ) -> Outcome:
        """Use a paused child again."""
        return self._one(ChildOp.RESUME, child, engine, wait_s, tell, number)

    @operation
    def restart_child(
        self,
        child: str,
        *,
        engine: str | None = None,
        wait_s: float = CHANGE_S,
        tell: Tell | None = None,
        number: str | None = None,
    ) -> Outcome:
        """End a child's hosts and start new ones: its next incarnation."""
        return self._one(ChildOp.RESTART, child, engine, wait_s, tell, number)

    @operation
    def reorder_children(
        self,
        names: Sequence[str],
        *,
        engine: str | None = None,
        wait_s: float = CHANGE_S,
        tell: Tell | None = None,
        number: str | None = None,
    ) -> Outcome:
        """Ask the children in this order; all of them are named, each once."""
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
            raise ConfigError(f"names is {show(names)}. It must be a list of the children's names.")
        chosen = new_number("reorder", number)
        return self._changed(engine, lambda of: chains.reorder_order(chosen, of, tuple(names), number is not None),
                             wait_s, tell)  # fmt: skip

    # -- parts ------------------------------------------------------------------------------------------------------

    def _one(
        self, op: ChildOp, child: str, engine: str | None, wait_s: float, tell: Tell | None, number: str | None
    ) -> Outcome:
        chosen = new_number(str(op), number)
        return self._changed(
            engine, lambda of: chains.child_order(chosen, of, op, child, number is not None), wait_s, tell
        )

    def _changed(
        self, engine: str | None, make: Callable[[Engine], ChainOrder], wait_s: float, tell: Tell | None
    ) -> Outcome:
        limit = seconds(wait_s, "wait_s") if wait_s != 0 else 0.0
        of = self._engine(engine)
        return chains.carry_out(self._desk(of), of, make(of), limit, tell)
