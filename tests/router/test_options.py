"""The router's options at the door, and what the refusals say."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from raykv.cluster_messages import EngineInfo, EngineRole
from raykv.config.cluster_spec import Transport
from raykv.config.router import RouterOptions, parse_router
from raykv.errors import ConfigError

P0 = {"name": "p0", "role": "prefill", "url": "http://10.0.0.7:8100/"}


def test_defaults_listen_to_this_machine_only() -> None:
    options = parse_router({})
    assert options == RouterOptions() and options.host == "127.0.0.1"
    assert pickle.loads(pickle.dumps(options)) == options


def test_everything_set() -> None:
    raw = {"host": "0.0.0.0", "port": 9000, "replicas": 2, "transport": "tiers", "min_prompt_chars": 0}
    engines = [P0, {"name": "b", "role": "both", "url": "https://[::1]:1", "node": "n"}]
    assert parse_router({**raw, "engines": engines, "avoid_s": 1}) == RouterOptions(
        host="0.0.0.0",
        port=9000,
        replicas=2,
        transport=Transport.TIERS,
        min_prompt_chars=0,
        avoid_s=1.0,
        engines=(
            EngineInfo("p0", EngineRole.PREFILL, "http://10.0.0.7:8100", "p0", True),
            EngineInfo("b", EngineRole.BOTH, "https://[::1]:1", "n", True),
        ),
    )


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"prot": 1}, ["Unknown key", "prot", '"port"']),
        ({"port": 70_000}, ["router.port is 70000", "65535"]),
        ({"transport": "nixel"}, ["router.transport", '"nixl"']),
        ({"min_prompt_chars": -1}, ["router.min_prompt_chars is -1"]),
        ({"prefill_timeout_s": 0}, ["router.prefill_timeout_s is 0"]),
        ({"url": "x"}, ["url", "an entry of router.engines"]),
        ({"engines": []}, ["router.engines is []", "at least one"]),
        ({"engines": ["p0"]}, ["router.engines[0]"]),
        ({"engines": [{"name": "p0", "role": "prefill"}]}, ["router.engines[0].url is missing"]),
        ({"engines": [{**P0, "role": "prefil"}]}, ["router.engines[0].role", '"prefill"']),
        ({"engines": [{**P0, "url": "10.0.0.7:8100"}]}, ["router.engines[0].url", "http://"]),
        ({"engines": [{**P0, "url": "http://a/v1"}]}, ["without a path", "/v1"]),
        ({"engines": [{**P0, "port": 1}]}, ["Unknown key", "router.engines[0]"]),
        ({"engines": [P0, P0]}, ["router.engines[1].name", "p0"]),
    ],
)
def test_bad_options_are_one_clear_error(raw: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_router(raw)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 700
    for word in words:
        assert word in message, message
