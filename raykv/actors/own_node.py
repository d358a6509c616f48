"""Which of several Ray nodes on one machine a process belongs to. (Tests simulate a cluster so.)

Ray joins a driver to the head's node if that is on the machine, else to any. An engine's process that an actor starts
belongs to the actor's node: its stores and hosts are looked for there.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

NODE_VARIABLE = "RAYKV_NODE_ID"
"""Set by an engine's actor: the id of its node."""
NAME_VARIABLE = "RAYKV_ENGINE_NAME"
"""Set by an engine's actor: the name of the replica, for people."""


@contextlib.contextmanager
def joined(services: Any) -> Iterator[None]:
    """Meanwhile, `ray.init` joins the node that NODE_VARIABLE names, if it is set. `services`: ray._private's."""
    chosen = os.environ.get(NODE_VARIABLE)
    if not chosen:
        yield
        return
    every = services.find_node_ids
    services.find_node_ids = lambda: [chosen] if chosen in every() else every()
    try:
        yield
    finally:
        services.find_node_ids = every
