"""The `events` of a spec."""

from __future__ import annotations

from typing import Any

import pytest

from raykv.config.cluster_parse import parse_spec
from raykv.errors import ConfigError
from raykv.event_messages import EventsOptions


def spec(events: Any, **more: Any) -> dict[str, Any]:
    return {"model": "m", "engines": [{"name": "main", **more.pop("engine", {})}], "events": events, **more}


def test_off_unless_wanted() -> None:
    assert parse_spec({"model": "m", "engines": [{"name": "main"}]}).events is None
    assert parse_spec(spec({})).events == EventsOptions("127.0.0.1", 5557, True)
    wanted = parse_spec(spec({"port": 6000, "host": "0.0.0.0", "hashes": "bytes"}))
    assert wanted.events == EventsOptions("0.0.0.0", 6000, False)


@pytest.mark.parametrize(
    ("events", "more", "says"),
    [
        ({"prt": 1}, {}, 'Unknown key "prt" in events. Did you mean "port"'),
        ({"port": 65_535}, {}, "events.port"),
        ({"hashes": "hex"}, {}, "events.hashes"),
        ({"replay_port": 1}, {}, "one above events.port"),
        (5557, {}, "events"),
        ({}, {"router": {"port": 5558}}, "Port 5558 is wanted by the router and by events"),
        ({}, {"engine": {"port": 5556, "replicas": 3}}, "Port 5557 is wanted by events and by engine main-1"),
    ],
)
def test_what_is_wrong_is_named(events: Any, more: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_spec(spec(events, **more))
    assert says in str(error.value)
