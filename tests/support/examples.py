"""How many examples a test of properties draws."""

from __future__ import annotations

import os

SOAK_TIMES = 20


def examples(count: int) -> int:
    """`count` in `make test`, which draws the same ones every time; many more, and new ones, in `make soak`."""
    return count * (SOAK_TIMES if os.environ.get("RAYKV_EXAMPLES") == "new" else 1)
