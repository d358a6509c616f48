"""The options of the event stream: {"port": 5557, "host": "127.0.0.1", "hashes": "int"}.

Whatever is wrong with them is a ConfigError that names the key, its value and the fix.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from raykv.config.reader import Reader
from raykv.event_messages import EventsOptions

KEYS = frozenset({"port", "host", "hashes"})


class Hashes(StrEnum):
    """How block hashes are written: as vLLM does by itself, or whole."""

    INT = "int"
    BYTES = "bytes"


def parse_events(raw: Mapping[str, Any], where: str = "events") -> EventsOptions:
    """Translate a mapping of these options. Raises ConfigError, and nothing else."""
    reader = Reader(raw, where)
    reader.only(KEYS, {"replay_port": f"nowhere: it is one above {where}.port"})
    default = EventsOptions()
    return EventsOptions(
        host=reader.text("host") or default.host,
        port=reader.count("port", default.port, 1, 65_534),
        int_hashes=reader.choice("hashes", Hashes, Hashes.INT) is Hashes.INT,
    )
