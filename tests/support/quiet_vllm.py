"""vLLM's processes sleep where they would spin: by importing this, or `python -m tests.support.quiet_vllm serve ...`.

vLLM's readers spin for a second after each message before they sleep. On two cores that starves whoever shares theirs
(a starting host got 5 % of a core): here they sleep after 2 ms, and are woken by vLLM's own notification. The processes
that vLLM spawns import the main module again, and with it this one, so it is so in each of them.
"""

from __future__ import annotations

import sys

from vllm.distributed.device_communicators import shm_broadcast

shm_broadcast.SpinCondition.__init__.__defaults__ = (0.002,)
# A writer may lose the word that would wake a sleeping reader (its socket holds one), which then looks again by itself,
# after 5 s. Those that spin seldom sleep.
shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS = 50

if __name__ == "__main__":
    from raykv.connector.vllm_main import main

    sys.exit(main())
