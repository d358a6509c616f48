"""How long a step that runs no request may sleep.

vLLM comes again at once while a connector has work that is not settled, about once a millisecond. On a machine of few
cores these empty steps take the time that the work needs: measured on two, an engine that waited for a transfer kept
one and a half of them busy. So a wait may cost a tenth of itself, and saves that nobody waits for a little more.
"""

from __future__ import annotations

SETTLING_S = 0.003
"""Where only saves are waited for. At most what a request that arrives in a quiet engine waits for such a step."""
SHARE = 0.1
LONGEST_S = 0.02


class IdlePause:
    """One engine's. One thread: the scheduler's."""

    def __init__(self) -> None:
        self._since: float | None = None

    def before_step(self, idle: bool, awaited: bool, now: float) -> float:
        """Seconds to sleep before this step is planned. `idle`: it runs no request; `awaited`: one waits for it."""
        if not idle:
            self._since = None
            return 0.0
        if self._since is None:
            self._since = now
        return min(LONGEST_S, max(0.0 if awaited else SETTLING_S, (now - self._since) * SHARE))
