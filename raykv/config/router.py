"""The options of the router, the front door of a cluster's engines.

    {"host": "127.0.0.1", "port": 8000, "transport": "nixl", "min_prompt_chars": 512,
     "engines": [{"name": "p0", "role": "prefill", "url": "http://10.0.0.7:8100"},
                 {"name": "d0", "role": "decode", "url": "http://10.0.0.8:8100"}]}

Whatever is wrong with it is a ConfigError that names the key, its value and the fix.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from raykv.cluster_messages import EngineInfo, EngineRole
from raykv.config.cluster_spec import Transport
from raykv.config.reader import Reader
from raykv.errors import ConfigError

ENGINE_KEYS = frozenset({"name", "role", "url", "node"})
ENGINE_EXAMPLE = '{"name": "d0", "role": "decode", "url": "http://10.0.0.8:8000"}'


@dataclass(frozen=True)
class RouterOptions:
    """What the router does and where it listens. Times are in seconds."""

    host: str = "127.0.0.1"
    """The address that Ray Serve's proxy listens on; "0.0.0.0" opens the door to the network."""
    port: int = 8000
    replicas: int = 1
    """Processes of the router. Each sees its own requests only, so one chooses best; two survive the loss of one."""
    transport: Transport = Transport.NIXL
    """How blocks come from a prefill engine to a decode engine. NIXL: `kv_transfer_params` are carried from one to the
    other. TIERS, FS: the prefill goes first, and the decode engine finds the blocks in its tiers."""
    engines: tuple[EngineInfo, ...] = ()
    """The engines, where no Controller runs. Empty: the Controller is asked, every `refresh_s`."""
    namespace: str = "raykv"
    """The Ray namespace of the Controller."""
    refresh_s: float = 1.0
    residency: bool = True
    """Learn what the stores hold of the prompts that come, and choose engines by it. It costs engines a second
    tokenizing and hashing of some prompts (ten a second at most), behind the requests."""
    min_prompt_chars: int = 512
    """A shorter prompt is computed by the decode engine alone; a prompt of token ids counts 4 for each. 0: never."""
    connect_timeout_s: float = 3.0
    """An engine that does not take the connection in this time is avoided for a while."""
    prefill_timeout_s: float = 60.0
    """A prefill that takes longer is given up, and another prefill engine tried."""
    silence_timeout_s: float = 600.0
    """An engine that sends nothing for so long has failed the request. Without streaming nothing comes before the
    whole answer, so this bounds its time."""
    avoid_s: float = 2.0
    """An engine that failed is avoided for this long; the time doubles with each failure in a row, up to a minute."""
    max_body_nbytes: int = 64 << 20
    """A larger request is refused (413)."""
    max_requests: int = 4096
    """Requests that one replica works on at once; the others wait in Ray Serve."""


KEYS = frozenset(field.name for field in dataclasses.fields(RouterOptions))


def parse_router(raw: Mapping[str, Any], where: str = "router") -> RouterOptions:
    """Translate a mapping of these options. Raises ConfigError, and nothing else."""
    reader = Reader(raw, where)
    reader.only(KEYS, dict.fromkeys(ENGINE_KEYS, f"an entry of {where}.engines"))
    default = RouterOptions()
    return RouterOptions(
        host=reader.text("host") or default.host,
        port=reader.count("port", default.port, 1, 65_535),
        replicas=reader.count("replicas", default.replicas, 1, 1000),
        transport=reader.choice("transport", Transport, default.transport),
        engines=_engines(reader),
        namespace=reader.text("namespace") or default.namespace,
        refresh_s=reader.seconds("refresh_s", default.refresh_s),
        residency=reader.flag("residency", default.residency),
        min_prompt_chars=reader.count("min_prompt_chars", default.min_prompt_chars, 0),
        connect_timeout_s=reader.seconds("connect_timeout_s", default.connect_timeout_s),
        prefill_timeout_s=reader.seconds("prefill_timeout_s", default.prefill_timeout_s),
        silence_timeout_s=reader.seconds("silence_timeout_s", default.silence_timeout_s),
        avoid_s=reader.seconds("avoid_s", default.avoid_s),
        max_body_nbytes=reader.count("max_body_nbytes", default.max_body_nbytes, 1024, 1 << 40),
        max_requests=reader.count("max_requests", default.max_requests),
    )


def _engines(reader: Reader) -> tuple[EngineInfo, ...]:
    raw = reader.raw.get("engines")
    if raw is None:
        return ()
    if not isinstance(raw, list | tuple) or not raw:
        raise reader.wrong("engines", f"a list with at least one engine, such as [{ENGINE_EXAMPLE}]")
    engines: dict[str, EngineInfo] = {}
    for index, one in enumerate(raw):
        where = f"{reader.path('engines')}[{index}]"
        if not isinstance(one, Mapping):
            raise ConfigError(f"{where} is no object. It must be one such as {ENGINE_EXAMPLE}.")
        engine = _engine(Reader(one, where))
        if engine.name in engines:
            raise ConfigError(f'{where}.name is "{engine.name}", as is an earlier one. Give each engine its own name.')
        engines[engine.name] = engine
    return tuple(engines.values())


def _engine(reader: Reader) -> EngineInfo:
    reader.only(ENGINE_KEYS, {})
    for key in ("name", "role", "url"):
        if reader.text(key) is None:
            raise ConfigError(f"{reader.path(key)} is missing. An engine is such as {ENGINE_EXAMPLE}.")
    role = reader.choice("role", EngineRole, EngineRole.BOTH)
    url = str(reader.raw["url"])
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise reader.wrong("url", 'the base of an engine\'s address, such as "http://10.0.0.8:8000"')
    if parts.path.rstrip("/"):
        raise reader.wrong("url", 'without a path: leave "/v1" and the like out')
    name = str(reader.raw["name"])
    return EngineInfo(name, role, url.rstrip("/"), reader.text("node") or name, ready=True)
