"""The ceiling of a hit rate: which prefix was ever held."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raykv.core.ever_held import EverHeld
from raykv.store_messages import FINGERPRINT_NBYTES, HASH_NBYTES

FINGERPRINT = bytes(range(FINGERPRINT_NBYTES))


def hashes(count: int, seed: int = 1) -> list[bytes]:
    dice = random.Random(seed)
    return [dice.randbytes(HASH_NBYTES) for _ in range(count)]


def keys(digests: list[bytes], fingerprint: bytes = FINGERPRINT) -> list[bytes]:
    return [fingerprint + b"\0" + digest for digest in digests]


@given(total=st.integers(0, 200), had=st.integers(0, 200), held=st.integers(0, 200))
def test_the_longest_prefix_that_was_held(total: int, had: int, held: int) -> None:
    had, prompt = min(had, total), hashes(total)
    ever = EverHeld(1 << 20)
    ever.add(keys(prompt[:had]))
    held = min(held, had)
    assert ever.prefix(FINGERPRINT, b"".join(prompt), held) == had
    # What is held now counts, were it never seen to be saved: it was found at the start.
    assert EverHeld(1 << 20).prefix(FINGERPRINT, b"".join(prompt), held) == held


def test_another_fingerprint_is_another_block() -> None:
    prompt = hashes(10)
    ever = EverHeld(1 << 20)
    ever.add(keys(prompt))
    assert ever.prefix(bytes(FINGERPRINT_NBYTES), b"".join(prompt), 0) == 0


def test_a_full_bitmap_forgets_the_oldest_and_is_seldom_wrong() -> None:
    ever = EverHeld(1 << 14)  # full at 1024 blocks
    prompts = [hashes(512, seed) for seed in range(8)]
    for prompt in prompts:
        ever.add(keys(prompt))
    assert ever.prefix(FINGERPRINT, b"".join(prompts[-1]), 0) == 512
    assert ever.prefix(FINGERPRINT, b"".join(prompts[0]), 0) < 50
    strangers = [ever.prefix(FINGERPRINT, one, 0) for one in hashes(1000, 99)]
    assert sum(strangers) < 60, "two bitmaps, each wrong once in 64 at worst"


@pytest.mark.parametrize("bits", [0, 4, 12])
def test_a_bitmap_has_a_power_of_two_bits(bits: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        EverHeld(bits)
