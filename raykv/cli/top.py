"""`raykv top`: the cluster live, a frame a second."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click
from rich.console import Group
from rich.text import Text

from raykv.api.shown import table
from raykv.api.watching import Rates, rates
from raykv.api.words import count, seconds, show_nbytes
from raykv.cli.base import fail, main, out
from raykv.cli.connected import ADDRESS, NAMESPACE, TIMEOUT, connected
from raykv.cli.status import STYLES
from raykv.errors import RayKVError

if TYPE_CHECKING:
    from raykv.api import Engine, Snapshot, Store

BAR = 16
WIDE = 100
"""Columns. In a narrower terminal there are no bars, and no growth: else cells would be folded."""
NOT_RUN = "not run"
FIRST = ("gpu", "host", "disk", "peer", "fs")
"""Sources in the order of their columns; children and "computed" follow."""


@main.command("top")
@ADDRESS
@NAMESPACE
@TIMEOUT
@click.option("--every", default=1.0, show_default=True, help="Seconds between two frames.")
@click.option("--for", "for_time", help="End after this time, such as 90s or 10m; else Ctrl-C.")
@click.option("--once", is_flag=True, help="Print one frame (after two looks, for the rates) and end.")
@click.option("--json", "as_json", is_flag=True, help="Print each frame as a line of JSON.")
def top_command(
    address: str | None,
    namespace: str,
    timeout: float,
    every: float,
    for_time: str | None,
    once: bool,
    as_json: bool,
) -> None:
    """Show engines, children and tiers as they work: tokens/s by source, fill, rates."""
    out.quiet = as_json
    try:
        pause = seconds(every, "--every", 3600.0)
        limit = None if for_time is None else seconds(for_time, "--for")
        with connected(address, namespace, timeout) as kv:
            if as_json or once or not out.is_terminal:
                _lines(kv, pause, limit, once, as_json)
            else:
                _live(kv, pause, limit)
    except RayKVError as error:
        fail(error, as_json)
    except KeyboardInterrupt:
        pass  # the way to end it


def _frames(kv: Any, pause: float, limit: float | None, once: bool) -> Any:
    """(snapshot, rates) a frame, the first after one pause, since rates need two looks."""
    deadline = None if limit is None else time.monotonic() + limit
    before = kv.snapshot()
    while True:
        time.sleep(pause)
        after = kv.snapshot()
        yield after, rates(before, after)
        before = after
        if once or (deadline is not None and time.monotonic() + pause > deadline):
            return


def _lines(kv: Any, pause: float, limit: float | None, once: bool, as_json: bool) -> None:
    for snapshot, speed in _frames(kv, pause, limit, once):
        if as_json:
            click.echo(json.dumps({**snapshot.to_dict(), "rates": speed.to_dict()}))
        else:
            out.print(frame(snapshot, speed, out.width))


def _live(kv: Any, pause: float, limit: float | None) -> None:
    from rich.live import Live

    with Live(console=out, screen=True, auto_refresh=False) as live:
        for snapshot, speed in _frames(kv, pause, limit, once=False):
            live.update(frame(snapshot, speed, out.width), refresh=True)


# -- a frame ----------------------------------------------------------------------------------------------------------


def frame(snapshot: Snapshot, speed: Rates, width: int = WIDE) -> Group:
    """All of a frame: who computes or loads how much, what each tier does, what is wrong."""
    parts: list[Any] = [_head(snapshot, speed)]
    if snapshot.engines:
        parts += [Text(), _engines(snapshot, speed), Text(), _children(snapshot)]
    if snapshot.stores:
        parts += [Text(), _tiers(snapshot, speed, width >= WIDE)]
    parts += [line for line in (*map(_engine_note, snapshot.engines), *map(_store_note, snapshot.stores)) if line]
    return Group(*parts)


def _head(snapshot: Snapshot, speed: Rates) -> Text:
    alive = sum(node.state == "alive" for node in snapshot.nodes)
    tokens = sum(ran(by_source) for by_source in speed.tokens.values())
    computed = sum(by_source.get("computed", 0.0) for by_source in speed.tokens.values())
    reused = f", {1 - computed / tokens:.0%} reused" if tokens else ""
    running = sum(engine.running for engine in snapshot.engines)
    clock = time.strftime("%H:%M:%S", time.localtime(snapshot.at))
    text = f"{clock}  {snapshot.address}  {alive} of {count(len(snapshot.nodes), 'node')}, "
    text += f"{count(len(snapshot.engines), 'engine')}, {count(len(snapshot.stores), 'store')}  "
    text += f"{count(running, 'request')} under way  {tokens:,.0f} prompt tokens/s{reused}"
    return Text(text, style="bold")


def ran(tokens: Mapping[str, float]) -> float:
    """Those of requests that did not end before they ran."""
    return sum(number for source, number in tokens.items() if source != NOT_RUN)


def _sources(engines: Any) -> list[str]:
    found = {source for engine in engines for source in engine.tokens}
    rest = sorted(found - {*FIRST, "computed", NOT_RUN})
    return [source for source in (*FIRST, *rest, "computed") if source in found]


def _engines(snapshot: Snapshot, speed: Rates) -> Any:
    sources = _sources(snapshot.engines)
    rows = []
    for engine in snapshot.engines:
        by_source = speed.tokens.get(engine.id, {})
        cells = [f"{by_source.get(source, 0.0):,.0f}" for source in sources]
        rows.append((engine.label, engine.host or "-", engine.running, *cells, _reused(by_source),
                     _reused(engine.tokens)))  # fmt: skip
    return table(("engine", "node", "runs#", *(f"{source}#" for source in sources), "reused now#", "ever#"), rows,
                 "prompt tokens/s by source")  # fmt: skip


def _reused(tokens: Mapping[str, float]) -> str:
    """The share that nobody computed."""
    whole = ran(tokens)
    return f"{1 - tokens.get('computed', 0) / whole:.0%}" if whole else "-"


def _children(snapshot: Snapshot) -> Any:
    rows = []
    for engine in snapshot.engines:
        for child in engine.children:
            loaded, saved = (child.counters.get(f"tokens_{what}", 0) for what in ("loaded", "saved"))
            failed = sum(number for name, number in child.counters.items() if "fail" in name or "timed_out" in name)
            state = Text(child.state, style=STYLES.get(child.state, "yellow"))
            does = "+".join(what for what, may in (("load", child.loads), ("save", child.saves)) if may)
            rate = engine.load_rates.get(child.name, 0.0)
            speed = f"{rate:,.0f}" if rate else "-"
            rows.append((engine.label, child.name, state, child.incarnation, does or "-", f"{loaded:,}", f"{saved:,}",
                         f"{failed:,}", speed))  # fmt: skip
    columns = ("engine", "child", "state", "restarts#", "may", "loaded#", "saved#", "failed#", "tokens/s#")
    return table(columns, rows, "children: tokens since the engine's start, and the speed of loads")


def _tiers(snapshot: Snapshot, speed: Rates, wide: bool) -> Any:
    rows = []
    for store in snapshot.stores:
        of_store = speed.stores.get(store.actor)
        for tier in store.tiers:
            rate = of_store.tiers.get(tier.medium) if of_store is not None else None
            bar = Text(("█" * round(tier.fill * BAR)).ljust(BAR, "░"), style="red" if tier.off else "green")
            hits, growth, evicted = (rate.hits, rate.growth, rate.evicted) if rate else (None, None, None)
            room = f"{show_nbytes(tier.used_nbytes)} of {show_nbytes(tier.capacity)}"
            rows.append((store.at, tier.medium, *([bar] if wide else []), f"{tier.fill:.0%}", room, _shown(hits),
                         *([_shown(growth, "+")] if wide else []), _shown(evicted), f"{tier.bad_reads:,}"))  # fmt: skip
    columns = ("store", "tier", *([""] if wide else []), "fill#", "room#", "hits/s#", *(["growth/s#"] if wide else []),
               "evicted/s#", "bad#")  # fmt: skip
    return table(columns, rows, "tiers, in blocks/s")


def _shown(rate: float | None, sign: str = "") -> str:
    return "-" if rate is None else f"{rate:{sign},.1f}"


def _engine_note(engine: Engine) -> Text | None:
    return Text(f"engine {engine.label}: {engine.problem}", style="yellow") if engine.problem else None


def _store_note(store: Store) -> Text | None:
    running = [f"{one.kind} {one.done:,} of {one.total:,}" for one in store.operations if one.running]
    off = [f"{tier.medium} is off: {tier.off}" for tier in store.tiers if tier.off]
    drained = [f"drained: {store.drain}"] if store.drain else []
    words = [*([store.problem] if store.problem else []), *off, *drained, *running]
    return Text(f"store {store.at}: {'; '.join(words)}", style="yellow") if words else None
