"""How a prefill engine's TierConnector tells a decode engine's what is on its way: in `kv_transfer_params`, by whoever
carries them (RayKV's router does).

    {"raykv_tiers": {"store": "raykv-store-default-0123456789ab", "tokens": 4096}}

No more than a hint. The decode engine finds blocks by the hashes of its own prompt's tokens, so a wrong hint makes it
wait, or ask a store that has nothing; it can't make it read anything else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from raykv.actors.store_handle import PREFIX
from raykv.store_messages import HandOver

KEY = "raykv_tiers"
STORE = re.compile(re.escape(PREFIX) + r"[A-Za-z0-9_.-]{1,64}-[0-9a-f]{1,64}")
"""The names of stores' actors: no other actor is ever called because of a hint."""


def is_wanted(params: Mapping[str, Any] | None) -> bool:
    """Whether somebody means to decode this request elsewhere, as vLLM's P/D proxies say it."""
    return bool(params and params.get("do_remote_decode"))


def hint(store: str, tokens: int) -> dict[str, Any]:
    """For the engine that decodes."""
    return {KEY: {"store": store, "tokens": tokens}}


def read_hint(params: Mapping[str, Any] | None, block_size: int, most_blocks: int) -> HandOver | None:
    """What is announced of a prompt with `most_blocks` blocks to load; None: nothing that could be waited for.

    Where another connector fetches the prompt (`do_remote_prefill`), nobody waits for the stores.
    """
    raw = params.get(KEY) if params and not params.get("do_remote_prefill") else None
    if not isinstance(raw, Mapping):
        return None
    store, tokens = raw.get("store"), raw.get("tokens")
    if not isinstance(store, str) or not STORE.fullmatch(store) or type(tokens) is not int:
        return None
    blocks = min(tokens // block_size, most_blocks)
    return HandOver(blocks, store) if blocks > 0 else None
