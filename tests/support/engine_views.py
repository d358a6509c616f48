"""What an engine tells of itself, made up."""

from __future__ import annotations

from typing import Any

from raykv.engine_messages import ChildView, EngineView, Missed, Story, TokenRange, Why
from raykv.types import EngineId, RequestId


def engine_view(**options: Any) -> EngineView:
    children = (
        ChildView("tier", "TierConnector", "inline", "up", True, True, 0, (), {"loads": 3, "load_ms": 1500}),
        ChildView("nixl", "NixlConnector", "actor", "down", True, True, 2, (), {"restarts": 2}),
    )
    return EngineView(
        EngineId("e"), "m", ("m",), "kv_both", 1, "n" * 40, "h", 0.0, 16, 4096, 1, "compose", children,
        prefill_rate=1000.0, load_rates={"tier": 5e4}, tokens={"host": 48, "computed": 52}, **options,
    )  # fmt: skip


def story(**options: Any) -> Story:
    ranges = (TokenRange(0, 48, "host", "tier"), TokenRange(48, 100, "computed"))
    missed = (Missed(48, 96, "tier", Why.EVICTED), Missed(48, 100, "nixl", Why.NOT_FOUND))
    return Story(RequestId("r"), EngineId("e"), 0.0, 100, ranges, missed, **options)
