"""Renders docs/api.md from docstrings and the help of `raykv`: `python -m scripts.api_docs [--check]`.

What stands in docs/api.md is written where the code is; tests/api/test_docs.py says when it must be rendered again.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "api.md"
HEAD = """# Python API and command line

Rendered by `scripts/api_docs.py` from docstrings and `--help`; don't edit it here. What each thing is for, and what to
do when something breaks, is in [operators.md](operators.md).

```python
import raykv

with raykv.connect() as kv:  # the cluster of RAY_ADDRESS, or of this machine
    print(kv.engines, kv.stores)  # rich.print(kv.snapshot()) shows tables
    found = kv.lookup("You are a helpful ...", engine="decode-0")
    print(found.said, found.to_dict())
    pin = kv.pin("You are a helpful ...", "10m")
    print(kv.explain("chatcmpl-123"))
    kv.unpin(pin.number)
```

- **Nothing changes on an error.** What can't be done is a `RayKVError` (`raykv.errors`) with one sentence that names
  the thing, its value and the fix. `NotFoundError`: there is no such thing; `NotDoneError`: begun, not ended as wanted.
- **Repeats are harmless.** Every change has a number, chosen once for each call and repeated on retries inside. Pass an
  outcome's `number` again to wait on, or after a lost connection.
- **Every result says what was done**: `said` is a sentence, `ok` whether nothing is left to do, `to_dict()` all of it
  for JSON; `rich.print` shows a table.
- **asyncio**: `kv.aio` has the same operations, to be awaited (`await kv.aio.pin(...)`, `await kv.aio.engines()`,
  `async for event in kv.aio.watch()`).
"""
RECORDS = (
    *("Node", "Engine", "Child", "Store", "Tier", "Snapshot"),
    *("Found", "Block", "Place", "Run", "Explanation", "Piece", "Reason"),
    *("Outcome", "Part", "Progress", "Pin", "Quota", "RunningOperation", "Event", "Rates"),
)
GROUPS = (
    ("What there is", ("snapshot", "nodes", "engines", "stores", "engine", "node", "store", "aio", "close")),
    ("Questions", ("lookup", "explain", "requests", "watch")),
    ("What stores hold", ("pin", "unpin", "pins", "prefetch", "clear", "set_quota", "quotas", "verify", "operations",
                          "operation")),
    ("Tiers", ("add_tier", "resize_tier", "drain_tier", "remove_tier")),
    ("Children of engines", ("add_child", "remove_child", "pause_child", "resume_child", "restart_child",
                             "reorder_children")),
    ("Nodes", ("drain_node", "undrain_node")),
)  # fmt: skip


def render() -> str:
    """The whole page."""
    from raykv import api

    parts = [HEAD, "## raykv.connect\n", *_member("raykv.connect", api.connect)]
    parts += ["## Cluster\n", _doc(api.Cluster)]
    for title, names in GROUPS:
        parts.append(f"### {title}\n")
        for name in names:
            parts += _member(name, inspect.getattr_static(api.Cluster, name))
    parts.append("## Records\n")
    for name in RECORDS:
        parts += _record(getattr(api, name))
    parts += ["## Command line\n", *_commands()]
    return "\n".join(parts).rstrip() + "\n"


def _doc(thing: Any) -> str:
    return (inspect.getdoc(thing) or "") + "\n"


def _member(name: str, thing: Any) -> Iterator[str]:
    if isinstance(thing, property):
        kind = str(inspect.signature(thing.fget).return_annotation) if thing.fget else ""
        yield f"**`{name}`** → `{kind}`\n"
    else:
        yield f"**`{name}{_signature(thing)}`**\n"
    yield _doc(thing)


def _signature(function: Any) -> str:
    """As it is written, without self, and without quotes around annotations."""
    signature = inspect.signature(function)
    parts, starred = [], False
    for one in signature.parameters.values():
        if one.name == "self":
            continue
        if one.kind is one.KEYWORD_ONLY and not starred:
            starred = True
            parts.append("*")
        parts.append(f"{one.name}: {one.annotation}" + ("" if one.default is one.empty else f" = {one.default!r}"))
    return f"({', '.join(parts)}) -> {signature.return_annotation}"


def _record(kind: Any) -> Iterator[str]:
    yield f"### {kind.__name__}\n"
    yield _doc(kind)
    fields = ", ".join(f"`{field.name}`" for field in dataclasses.fields(kind))
    yield f"Fields: {fields}.\n"
    more = [name for name, one in vars(kind).items() if isinstance(one, property) and not name.startswith("_")]
    for name in more:
        yield f"- `{name}`: {' '.join((inspect.getdoc(getattr(kind, name)) or '').split())}"
    if more:
        yield ""


def _commands() -> Iterator[str]:
    from raykv.cli import main

    yield "Each has `--json` for scripts and `--help`. Sizes are written like 64GiB, times like 90s, 10m or 1h30m.\n"
    yield "| exit code | |\n|---|---|"
    for line in (main.epilog or "").splitlines():
        found = re.match(r"\s*(\d)\s+(.*)", line)
        if found:
            yield f"| {found[1]} | {found[2]} |"
    yield ""
    for name, one in sorted(main.commands.items()):
        yield from _command(f"raykv {name}", one)
        for inner, each in sorted(getattr(one, "commands", {}).items()):
            yield from _command(f"raykv {name} {inner}", each)


def _command(name: str, one: click.Command) -> Iterator[str]:
    arguments = [p.make_metavar(click.Context(one)) for p in one.params if isinstance(p, click.Argument)]
    yield f"**`{' '.join([name, *filter(None, arguments)])}`**\n"
    text = inspect.cleandoc(one.help or "")
    if "\b\n" in text:
        before, _, after = text.partition("\b\n")
        yield f"{before.rstrip()}\n\n```console\n{after.rstrip()}\n```\n"
    else:
        yield f"{text}\n"
    shown = [p for p in one.params if isinstance(p, click.Option) and p.help and not _everywhere(p)]
    for option in shown:
        yield f"- `{', '.join(option.opts + option.secondary_opts)}`: {option.help}"
    if shown:
        yield ""


def _everywhere(option: click.Option) -> bool:
    return bool({"--json", "--address", "--namespace", "--timeout", "--help"} & set(option.opts))


def main() -> None:
    page = render()
    if "--check" in sys.argv[1:]:
        if PAGE.read_text() != page:
            raise SystemExit(f"{PAGE.name} is not what the docstrings say: run python -m scripts.api_docs")
        return
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
