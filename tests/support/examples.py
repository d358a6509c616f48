"""How many examples a test of properties draws."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

SOAK_TIMES = 20


def examples(count: int) -> int:
    """`count` in `make test`, which draws the same ones every time; many more, and new ones, in `make soak`."""
    return count * (SOAK_TIMES if os.environ.get("RAYKV_EXAMPLES") == "new" else 1)


def histories(count: int) -> settings:
    """For a state machine: `count` histories of 50 steps, of which as many as it likes may be steps that can't be."""
    return settings(
        deadline=None,
        max_examples=examples(count),
        stateful_step_count=50,
        suppress_health_check=list(HealthCheck),
    )
