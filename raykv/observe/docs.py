"""The tables of docs/metrics.md, from the tables of the code. A test holds the page to them.

python -m raykv.observe PAGE
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from raykv.observe import names
from raykv.observe.alerts import ALERTS
from raykv.observe.names import COMMON, METRICS, By
from raykv.observe.panels import PANELS


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _metrics(by: By) -> str:
    rows = (
        (f"`{m.name}`", m.kind, m.unit, " ".join(f"`{label}`" for label in m.own_labels), m.help)
        for m in METRICS
        if m.by is by
    )
    common = " ".join(f"`{label}`" for label in COMMON[by])
    said = f"Each has the labels {common}, and its own.\n\n" if common else ""
    return said + _table(("name", "kind", "unit", "own labels", "what it says"), rows)


def _vllm() -> str:
    rows = [(f"`vllm:raykv_{name}`", "`raykv_child`", about) for name, about in names.CHILD_COUNTERS.items()]
    for name, about in names.CHILD_TIMES.items():
        rows.append((f"`vllm:raykv_{names.seconds_name(name)}`", "`raykv_child`", about))
    for name, about in names.CHILD_GAUGES.items():
        rows.append((f"`vllm:raykv_child_{name}`", "`raykv_child`", about))
    for name, (about, labels) in names.WHOLE_COUNTERS.items():
        rows.append((f"`vllm:raykv_{name}`", " ".join(f"`{label}`" for label in labels), about))
    for name, about in names.TIER_COUNTERS.items():
        rows.append((f"`vllm:raykv_tier_{name}`", "", about))
    for name, about in names.TIER_TIMES.items():
        rows.append((f"`vllm:raykv_tier_{names.seconds_name(name)}`", "", about))
    return _table(("name", "own labels", "what it says"), rows)


def _alerts() -> str:
    return _table(
        ("alert", "fires when", "for", "what it means", "what to do"),
        ((f"`{a.name}`", f"`{a.expr}`", a.lasts, a.means, a.do) for a in ALERTS),
    )


def _panels() -> str:
    rows: dict[str, list[str]] = {}
    for panel in PANELS:
        rows.setdefault(panel.row, []).append(panel.title)
    return _table(("row", "panels"), ((row, "; ".join(titles)) for row, titles in rows.items()))


def sections() -> Iterator[tuple[str, str]]:
    """By the name in its marks: each part of the page that is made."""
    for by in By:
        yield str(by), _metrics(by)
    yield "vllm", _vllm()
    yield "panels", _panels()
    yield "alerts", _alerts()


def filled(page: str) -> str:
    """The page with its made parts as they should be. Raises ValueError if the marks of one are missing."""
    for name, text in sections():
        begin, end = f"<!-- made: {name} -->\n", f"\n<!-- end: {name} -->"
        parts = re.split(re.escape(begin) + ".*?" + re.escape(end), page, flags=re.DOTALL)
        if len(parts) != 2:
            raise ValueError(f"the page has no marks `made: {name}` and `end: {name}`, or several")
        page = (begin + text + end).join(parts)
    return page
