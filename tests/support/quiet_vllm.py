"""`python -m tests.support.quiet_vllm serve ...`: vLLM's command line, whose processes sleep where they would spin.

As in `engine_process`: vLLM's readers spin for a second after each message, and several engines share two cores here.
vLLM's processes import this module again, so it is so in each of them.
"""

from __future__ import annotations

import sys

from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

SpinCondition.__init__.__defaults__ = (0.002,)

if __name__ == "__main__":
    from raykv.connector.vllm_main import main

    sys.exit(main())
