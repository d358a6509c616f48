"""An engine's figures as samples: from its view and the stories of its requests, both made beside the hot path."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from raykv.core.histogram import Histogram
from raykv.engine_messages import ChildView, EngineView, Story
from raykv.observe.names import CHILD_COUNTERS, CHILD_TIMES, seconds_name
from raykv.observe.samples import Sample
from raykv.types import NODE_CHARS

STATES = ("up", "down", "paused", "off", "starting", "leaving")
"""Of a child, as ChildView has them."""


class EngineMeter:
    """Sums over the stories of requests that have ended. The thread that takes the stories adds; any thread reads."""

    def __init__(self) -> None:
        self.missed: Counter[tuple[str, str]] = Counter()
        """Tokens by child and reason."""
        self.look_ups, self.loads = Histogram(), Histogram()
        self.saved_s = 0.0
        """Seconds of prefill that loads saved, less what they took."""

    def add(self, story: Story) -> None:
        """One more request has ended."""
        for one in story.missed:
            self.missed[one.child, str(one.why)] += one.last - one.first
        self.look_ups.add(story.lookup_s)
        if story.load_s > 0:
            self.loads.add(story.load_s)
            if story.recompute_s > 0:
                self.saved_s += max(0.0, story.recompute_s - story.load_s)


def engine_samples(view: EngineView, meter: EngineMeter | None = None) -> Iterator[Sample]:
    """All that an engine reports. Without a meter the figures by request are left out."""
    mine = (str(view.engine), view.role, view.node[:NODE_CHARS])
    for source in {"gpu", "computed", *view.tokens}:
        yield Sample("raykv_tokens_total", (*mine, source), view.tokens.get(source, 0))
    yield Sample("raykv_requests_running", mine, view.running)
    yield Sample("raykv_prefill_tokens_per_second", mine, view.prefill_rate)
    for name, rate in view.load_rates.items():
        yield Sample("raykv_child_load_tokens_per_second", (*mine, name), rate)
    for child in view.children:
        yield from _child(mine, child)
    if meter is not None:
        for at, tokens in list(meter.missed.items()):
            yield Sample("raykv_missed_tokens_total", (*mine, *at), tokens)
        yield Sample("raykv_engine_look_up_seconds", mine, meter.look_ups.read())
        yield Sample("raykv_engine_load_seconds", mine, meter.loads.read())
        yield Sample("raykv_saved_by_loads_seconds_total", mine, meter.saved_s)


def _child(mine: tuple[str, ...], child: ChildView) -> Iterator[Sample]:
    at = (*mine, child.name, child.connector)
    yield Sample("raykv_child_up", at, child.state == "up")
    yield Sample("raykv_child_incarnation", at, child.incarnation)
    for state in STATES:
        yield Sample("raykv_child_state", (*mine, child.name, state), child.state == state)
    for name in CHILD_COUNTERS:
        yield Sample(f"raykv_child_{name}_total", at, child.counters.get(name, 0))
    for name in CHILD_TIMES:
        yield Sample(f"raykv_child_{seconds_name(name)}_total", at, child.counters.get(name, 0) / 1000)
