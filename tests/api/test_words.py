from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raykv.api import finding, words
from raykv.api.errors import NotFoundError
from raykv.errors import ConfigError, RayKVError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("10m", 600), ("1h30m", 5400), ("2d", 172_800), ("1h 5m", 3900), (7, 7), ("7.5", 7.5), (" 1M ", 60)],
)
def test_durations(text: object, seconds: float) -> None:
    assert words.seconds(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "10", -1, 0, True, None, "10x", "m", "1h-5m", "99d", float("nan"), float("inf"), []]
)
def test_bad_durations_name_value_and_fix(text: object) -> None:
    if text == "10":
        assert words.seconds(text) == 10
        return
    with pytest.raises(ConfigError, match=r"^for is .* It must be a time above 0 and at most 30 d, such as") as error:
        words.seconds(text, "for")
    assert "\n" not in str(error.value)


@given(st.one_of(st.text(), st.integers(), st.floats(), st.booleans(), st.none(), st.lists(st.integers(), max_size=2)))
def test_anything_is_a_time_and_a_size_or_a_config_error(value: object) -> None:
    for parse in (words.seconds, words.nbytes):
        try:
            number = parse(value)
        except RayKVError as error:
            assert isinstance(error, ConfigError)
        else:
            assert number > 0


def test_sizes() -> None:
    assert words.nbytes("64GiB") == 64 << 30
    with pytest.raises(ConfigError, match='capacity is "-5"'):
        words.nbytes("-5", "capacity")
    assert words.nbytes(0, least=0) == 0


@pytest.mark.parametrize(
    ("value", "text"), [(0.0008, "0.8 ms"), (1.25, "1.25 s"), (720, "12 m"), (12_000, "3 h 20 m"), (180_000, "2 d 2 h")]
)
def test_times_for_people(value: float, text: str) -> None:
    assert words.show_seconds(value) == text


def test_bytes_for_people() -> None:
    assert [words.show_nbytes(n) for n in (0, 512, 1536, 64 << 30, 3 << 40)] == [
        "0 B",
        "512 B",
        "1.5 KiB",
        "64 GiB",
        "3 TiB",
    ]


def test_a_name_that_is_not_there() -> None:
    error = words.unknown("pin", "pin-abc", ["pin-abd", "other"])
    assert isinstance(error, NotFoundError)
    assert str(error) == 'There is no pin "pin-abc". Did you mean "pin-abd"? Valid: other, pin-abd.'


def test_tenants() -> None:
    salted = finding.tenant("alice")
    assert finding.tenant(f"tag:{salted.upper()}") == salted and finding.tenant("") == "00" * 8
    for wrong in ("tag:", "tag:12", "tag:" + "zz" * 8):
        with pytest.raises(ConfigError, match="hexadecimal"):
            finding.tenant(wrong)
