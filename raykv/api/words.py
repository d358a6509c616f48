"""Sizes, durations and names as people write them, and the other way round. No imports that cost anything."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable

from raykv.api.errors import NotFoundError
from raykv.config.reader import MAX_SECONDS, Reader, did_you_mean, show
from raykv.config.tiers import PAGE, size
from raykv.errors import ConfigError

MAX_PIN_S = 30 * MAX_SECONDS
UNITS_S = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
PART = re.compile(r"(\d+(?:\.\d+)?)([smhd]?)")
DURATION = re.compile(r"\s*(?:\d+(?:\.\d+)?[smhd]\s*)+|\s*\d+(?:\.\d+)?\s*", re.IGNORECASE)


def nbytes(value: object, what: str = "size", least: int = PAGE) -> int:
    """Bytes of "64GiB", "1.5TB" or a whole number. Raises ConfigError below `least`."""
    return size(Reader({what: value}, ""), what, least)


def seconds(value: object, what: str = "time", most: float = MAX_PIN_S) -> float:
    """Seconds of 90, "90", "10m", "1h30m" or "2d". Raises ConfigError unless in (0, `most`]."""
    number: float | None = None
    if isinstance(value, int | float) and not isinstance(value, bool):
        number = float(value)
    elif isinstance(value, str) and len(value) <= 40 and DURATION.fullmatch(value):
        number = sum(float(count) * UNITS_S[unit] for count, unit in PART.findall(value.lower()))
    if number is None or not 0 < number <= most:
        needed = (
            f'a time above 0 and at most {show_seconds(most)}, such as "90s", "10m", "1h30m" or a number of seconds'
        )
        raise ConfigError(f"{what} is {show(value)}. It must be {needed}.")
    return number


def show_nbytes(value: float) -> str:
    """Such as 64 GiB, 1.5 GiB, 512 B."""
    number = float(value)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(number) < 1024 or unit == "TiB":
            break
        number /= 1024
    return f"{number:.0f} {unit}" if number == int(number) or number >= 100 else f"{number:.1f} {unit}"


def show_seconds(value: float) -> str:
    """Such as 0.8 ms, 1.2 s, 12 m, 3 h 20 m, 2 d."""
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    if value < 120:
        return f"{value:.3g} s"
    minutes = round(value / 60)
    for name, size_ in (("d", 1440), ("h", 60)):
        if minutes >= size_:
            rest = minutes % size_ // (60 if name == "d" else 1)
            return f"{minutes // size_} {name}" + (f" {rest} {'h' if name == 'd' else 'm'}" if rest else "")
    return f"{minutes} m"


def show_at(at: float, now: float | None = None) -> str:
    """A moment, as how long ago it was or how long it is until then; "-" for 0."""
    if not at:
        return "-"
    distance = (time.time() if now is None else now) - at
    return f"{show_seconds(distance)} ago" if distance >= 0 else f"in {show_seconds(-distance)}"


def count(number: int, thing: str) -> str:
    """Such as 1 block, 1,024 blocks."""
    return f"{number:,} {thing}" + ("" if number == 1 else "s")


def unknown(kind: str, name: object, valid: Iterable[str]) -> NotFoundError:
    """The error for a name that is not there, with the nearest one that is."""
    return NotFoundError(f"There is no {kind} {show(name)}. {did_you_mean(str(name), valid)}")
