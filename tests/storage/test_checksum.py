"""The checksum is xxh3_64, whatever holds the bytes."""

from __future__ import annotations

import pytest
import torch
import xxhash

from raykv.storage.checksum import checksum, matches


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 256 * 1024, 256 * 1024 + 1])
def test_it_is_xxh3_64_in_every_form(nbytes: int) -> None:
    data = torch.randint(0, 256, (nbytes + 3,), dtype=torch.uint8)[3:]
    raw = bytes(data.numpy())
    expected = xxhash.xxh3_64_intdigest(raw)
    assert checksum(data) == checksum(raw) == checksum(memoryview(raw)) == checksum(bytearray(raw)) == expected
    assert matches(data, expected)
    assert not matches(torch.cat([data, data.new_zeros(1)]), expected), "the length counts"


def test_a_flip_of_any_bit_is_seen() -> None:
    data = torch.randint(0, 256, (300,), dtype=torch.uint8)
    expected = checksum(data)
    for place in range(300):
        for bit in range(8):
            data[place] ^= 1 << bit
            assert not matches(data, expected)
            data[place] ^= 1 << bit
    assert matches(data, expected)


@pytest.mark.parametrize("data", [torch.zeros(4), torch.zeros(8, dtype=torch.uint8)[::2]])
def test_what_are_no_bytes_is_an_error(data: torch.Tensor) -> None:
    with pytest.raises(ValueError):
        checksum(data)
