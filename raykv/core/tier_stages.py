"""What a tier is at while an operator changes it, and what may happen to it then.

The theory. A tier is in one stage:

    SERVING ──shrink──▶ SHRINKING ──settle──▶ SERVING
       │ drain                                   ▲ reopen
       ▼                                         │
    DRAINING ──settle──▶ DRAINED ────────────────┘
       ▲   │ drain (again: nothing changes)   │
       └───┴──────────── drain ───────────────┘
    SERVING, DRAINED ──leave──▶ LEAVING        (and when it is empty: gone)

Any other step raises IntegrityError and changes nothing.
"""

from __future__ import annotations

import enum


class Stage(enum.Enum):
    """What a tier is at."""

    SERVING = "serving"
    SHRINKING = "shrinking"
    DRAINING = "draining"
    DRAINED = "drained"
    LEAVING = "leaving"


class Change(enum.Enum):
    """What happens to it."""

    SHRINK = "shrink"
    DRAIN = "drain"
    SETTLE = "settle"
    REOPEN = "reopen"
    LEAVE = "leave"


NEXT: dict[tuple[Stage, Change], Stage] = {
    (Stage.SERVING, Change.SHRINK): Stage.SHRINKING,
    (Stage.SHRINKING, Change.SETTLE): Stage.SERVING,
    (Stage.SERVING, Change.DRAIN): Stage.DRAINING,
    (Stage.DRAINING, Change.DRAIN): Stage.DRAINING,
    (Stage.DRAINED, Change.DRAIN): Stage.DRAINING,
    (Stage.DRAINING, Change.SETTLE): Stage.DRAINED,
    (Stage.DRAINED, Change.REOPEN): Stage.SERVING,
    (Stage.SERVING, Change.LEAVE): Stage.LEAVING,
    (Stage.DRAINED, Change.LEAVE): Stage.LEAVING,
}
