"""`python -m tests.support.quiet_vllm serve ...`: vLLM's command line, whose processes sleep where they would spin.

As in `engine_process`: vLLM's readers spin for a second after each message, and several engines share two cores here.
vLLM's processes import this module again, so it is so in each of them.
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
