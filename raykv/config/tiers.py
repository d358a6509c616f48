"""The JSON of a TierConnector, its `kv_connector_extra_config`, translated once into frozen objects.

    {"tiers": [{"medium": "host", "capacity": "64GiB"},
               {"medium": "disk", "path": "/nvme/raykv", "capacity": "2TiB"},
               {"medium": "peer"},
               {"medium": "fs", "path": "/mnt/shared/kv", "capacity": "10TiB"}],
     "store": "default", "checksum": true, "eviction": "lru", "cascade": "evict"}

Whatever is wrong with it is a ConfigError that names the key, its value and the fix.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raykv.config.reader import Reader
from raykv.errors import ConfigError
from raykv.store_messages import Cascade, Eviction, Medium, StoreSpec, TierSpec

EXTRA = "kv_connector_extra_config"
KEYS = frozenset(
    {
        "tiers",
        "store",
        "checksum",
        "eviction",
        "cascade",
        "slot",
        "lease_s",
        "lookup_timeout_s",
        "timeout_s",
        "load_timeout_s",
        "model_identity",
        "ray_address",
        "namespace",
    }
)
TIER_KEYS = frozenset({"medium", "capacity", "path"})
OF_TIER = dict.fromkeys(TIER_KEYS, f"an entry of {EXTRA}.tiers")
OF_WHOLE = dict.fromkeys(KEYS, EXTRA)
OF_MULTI = {"raykv": f"the {EXTRA} of a MultiConnector's child", "connectors": f"the {EXTRA} of a MultiConnector"}
EXAMPLE = '[{"medium": "host", "capacity": "64GiB"}]'

UNITS = {
    "": 1,
    "b": 1,
    **{f"{letter}ib": 1 << 10 * power for power, letter in enumerate("kmgtp", 1)},
    **{f"{letter}b": 10 ** (3 * power) for power, letter in enumerate("kmgtp", 1)},
}
SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)
PAGE = 4096
MAX_NBYTES = 1 << 60
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True)
class TierOptions:
    """What a TierConnector wants: its node's store, and its own time limits in seconds."""

    store: StoreSpec
    lookup_timeout_s: float = 1.0
    """A look-up that is not answered in this time counts as a miss."""
    timeout_s: float = 10.0
    """A store that does not end a save, or another call, in this time (and time for its bytes) counts as hung."""
    load_timeout_s: float = 30.0
    """The same for a load; its request is then recomputed."""
    model_identity: str | None = None
    """Stands for the content of the model's weights where RayKV can't read their files."""
    ray_address: str | None = None
    """None: RAY_ADDRESS, then a running local cluster. A child has that of its MultiConnector."""
    namespace: str = "raykv"
    """The Ray namespace of the store. A child has that of its MultiConnector."""


def parse_tiers(extra: Mapping[str, Any]) -> TierOptions:
    """Translate a TierConnector's extra config. Raises ConfigError, and nothing else, for JSON that can't be used."""
    top = Reader(extra, EXTRA)
    top.only(KEYS, {**OF_TIER, **OF_MULTI})
    default = TierOptions(StoreSpec("default", ()))
    tiers, peer = _tiers(top)
    spec = StoreSpec(
        name=_name(top),
        tiers=tiers,
        slot_nbytes=0 if top.raw.get("slot") is None else size(top, "slot", PAGE, page=True),
        checksum=top.flag("checksum", default.store.checksum),
        eviction=top.choice("eviction", Eviction, default.store.eviction),
        cascade=top.choice("cascade", Cascade, default.store.cascade),
        lease_s=top.seconds("lease_s", default.store.lease_s),
        peer=peer,
    )
    return TierOptions(
        store=spec,
        lookup_timeout_s=top.seconds("lookup_timeout_s", default.lookup_timeout_s),
        timeout_s=top.seconds("timeout_s", default.timeout_s),
        load_timeout_s=top.seconds("load_timeout_s", default.load_timeout_s),
        model_identity=top.text("model_identity"),
        ray_address=top.text("ray_address"),
        namespace=top.text("namespace") or default.namespace,
    )


def size(reader: Reader, key: str, least: int, page: bool = False) -> int:
    """Bytes: a whole number, or a text with a unit such as "64GiB" or "1.5TB". `page`: a multiple of 4096."""
    value = reader.raw.get(key)
    needed = f'a size of at least {least} bytes, such as "64GiB", "512MiB" or a whole number of bytes'
    number = _bytes_of(value)
    if number is None or not least <= number <= MAX_NBYTES:
        raise reader.wrong(key, needed) if key in reader.raw else _missing(reader, key, needed)
    if page and number % PAGE:
        raise reader.wrong(key, f"a multiple of {PAGE} bytes: disks are read past the page cache in such pieces")
    return number


def _bytes_of(value: object) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    found = SIZE.fullmatch(value) if isinstance(value, str) and len(value) <= 40 else None
    if found is None or found[2].lower() not in UNITS:
        return None
    unit = UNITS[found[2].lower()]
    return int(found[1]) * unit if found[1].isdigit() else int(float(found[1]) * unit)


def _missing(reader: Reader, key: str, needed: str) -> ConfigError:
    return ConfigError(f"{reader.path(key)} is missing. It must be {needed}.")


def _name(top: Reader) -> str:
    name = top.text("store")
    if name is not None and not NAME.fullmatch(name):
        raise top.wrong("store", "at most 64 of the letters A-Z and a-z, digits, '_', '.' and '-'")
    return name or "default"


def _tiers(top: Reader) -> tuple[tuple[TierSpec, ...], bool]:
    """The store's own tiers, and whether it reads from other nodes' stores."""
    raw = top.raw.get("tiers")
    if raw is None:
        raise ConfigError(f"{top.path('tiers')} is missing. List the tiers there, fastest first: {EXAMPLE}.")
    if not isinstance(raw, list | tuple) or not raw:
        raise top.wrong("tiers", f"a list with at least one tier, such as {EXAMPLE}")
    tiers: list[TierSpec] = []
    for index, one in enumerate(raw):
        where = f"{top.path('tiers')}[{index}]"
        if not isinstance(one, Mapping):
            raise ConfigError(f"{where} is no object. It must be one such as {EXAMPLE[1:-1]}.")
        tier = _tier(Reader(one, where))
        for earlier, other in enumerate(tiers):
            if other.medium is tier.medium:
                raise ConfigError(
                    f'{where}.medium is "{tier.medium}", as is that of tiers[{earlier}]. A store has one tier of each '
                    "medium: give it the capacity of both, or make two stores by their `store` names."
                )
        tiers.append(tier)
    order = list(Medium)
    if [t.medium for t in tiers] != sorted((t.medium for t in tiers), key=order.index):
        raise ConfigError(
            f"{top.path('tiers')} lists {', '.join(t.medium for t in tiers)}. List the tiers fastest first: "
            f"{', '.join(order)}."
        )
    own = tuple(tier for tier in tiers if tier.medium is not Medium.PEER)
    if not own:
        raise ConfigError(
            f'{top.path("tiers")} lists nothing but "{Medium.PEER}", the tiers of other nodes. Add a tier of this '
            f"node: {EXAMPLE[1:-1]}."
        )
    if own[0].medium is Medium.FS:
        raise ConfigError(
            f'{top.path("tiers")} has no tier of this node before "{Medium.FS}". Blocks go to the shared folder by way '
            f"of one: list {EXAMPLE[1:-1]} first."
        )
    return own, len(own) < len(tiers)


def _tier(tier: Reader) -> TierSpec:
    tier.only(TIER_KEYS, OF_WHOLE)
    if tier.raw.get("medium") is None:
        raise ConfigError(f"{tier.path('medium')} is missing. It must be one of {', '.join(Medium)}.")
    medium = tier.choice("medium", Medium, Medium.HOST)
    if medium is Medium.PEER:
        for key in ("capacity", "path"):
            if tier.raw.get(key) is not None:
                raise tier.wrong(key, f'left out: "{Medium.PEER}" is the room that other nodes have, by their config')
        return TierSpec(medium, 0)
    path = tier.text("path")
    if medium is Medium.HOST and path is not None:
        raise ConfigError(f'{tier.path("path")} is "{path}", but host memory has no folder. Leave the key out.')
    if medium is not Medium.HOST:
        path = _folder(tier, path, medium)
    return TierSpec(medium, size(tier, "capacity", PAGE), path)


def _folder(tier: Reader, path: str | None, medium: Medium) -> str:
    if path is None:
        example = "/nvme/raykv" if medium is Medium.DISK else "/mnt/shared/raykv"
        kind = "folder on the disk" if medium is Medium.DISK else "folder that all nodes share"
        raise ConfigError(f'{tier.path("path")} is missing. Name a {kind} there, such as "{example}".')
    path = os.path.expanduser(path)
    if not os.path.isabs(path) or "\0" in path:
        raise tier.wrong("path", "an absolute path: the store does not run in this process's working directory")
    return path
