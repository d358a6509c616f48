"""The prompts whose expected tokens the baseline engine makes once. Token ids: no tokenizer is in the way."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping

MAX_TOKENS = 16


def prompt(length: int, seed: int = 0) -> list[int]:
    """`length` random byte tokens of the tiny model; equal seeds share their beginning."""
    rng = random.Random(seed)
    return [rng.randrange(4, 260) for _ in range(length)]


PROMPTS: dict[str, list[int]] = {
    "short": prompt(12, seed=1),
    "page": prompt(350, seed=2),
    "long": prompt(1200, seed=3),
    # the same first 800 tokens as `long`, then its own end
    "branch": prompt(800, seed=3) + prompt(300, seed=4),
    "branch2": prompt(800, seed=3) + prompt(200, seed=6),
    # ends exactly on a block of 32 and of 128 tokens
    "aligned": prompt(512, seed=5),
    **{f"crowd{i}": prompt(180 + 20 * i, seed=10 + i) for i in range(8)},
}


LOAD_TOKENS = 32
LOAD: dict[str, list[int]] = {f"load{i}": prompt(100 + 27 * (i % 8), seed=100 + i) for i in range(48)}
"""For a load that goes on for minutes: more of them than a small KV cache holds."""


def fingerprint(prompts: Mapping[str, list[int]] = PROMPTS, max_tokens: int = MAX_TOKENS) -> str:
    """Changes with any prompt, so that stored expectations go stale by themselves."""
    return hashlib.sha256(json.dumps([prompts, max_tokens]).encode()).hexdigest()[:16]
