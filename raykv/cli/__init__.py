"""The command line, `raykv`. Ray is imported only by what needs it."""

from raykv.cli import (
    ask,
    bench,
    check,
    child,
    cluster,
    completion,
    content,
    doctor,
    local,
    serve,
    status,
    tiers,
    top,
)
from raykv.cli.base import main

__all__ = [
    "ask",
    "bench",
    "check",
    "child",
    "cluster",
    "completion",
    "content",
    "doctor",
    "local",
    "main",
    "serve",
    "status",
    "tiers",
    "top",
]
