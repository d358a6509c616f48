"""Arguments of the wrong kind are refused by name, before anything else is done with them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from raykv.config.reader import show
from raykv.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")

MAX_TEXT = 10_000
NEEDED = {"str": "a text", "bool": "True or False", "Tell": "a function"}


def operation(method: Callable[P, R]) -> Callable[P, R]:
    """A method whose arguments that are annotated as texts, flags or functions are checked to be such.

    The other kinds (prompts, sizes, times, lists) are checked where they are read.
    """
    signature = inspect.signature(method)
    kinds = {name: str(parameter.annotation) for name, parameter in signature.parameters.items()}

    @functools.wraps(method)
    def run(*args: P.args, **options: P.kwargs) -> R:
        for name, value in signature.bind(*args, **options).arguments.items():
            kind, _, more = kinds[name].partition(" | ")
            if kind in NEEDED and not (value is None and "None" in more) and not _is(value, kind):
                raise ConfigError(f"{name} is {show(value)}. It must be {NEEDED[kind]}.")
        return method(*args, **options)

    return run


def _is(value: object, kind: str) -> bool:
    if kind == "str":
        return isinstance(value, str) and len(value) <= MAX_TEXT
    return isinstance(value, bool) if kind == "bool" else callable(value)
