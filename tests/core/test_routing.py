"""The choice of an engine, against a plain model of the rule."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from raykv.cluster_messages import EngineInfo, EngineRole
from raykv.core.routing import (
    AFFINITY,
    CHUNK_CHARS,
    HOLDERS,
    MAX_AVOID_S,
    MAX_CHUNKS,
    SLACK,
    Prefix,
    RoutingTable,
    TextPrefixes,
    cut,
)
from raykv.errors import IntegrityError

PREFILL = (EngineRole.PREFILL,)


def engine(name: str, role: EngineRole = EngineRole.PREFILL, ready: bool = True, url: str = "") -> EngineInfo:
    return EngineInfo(name, role, url or f"http://{name}", f"node-{name}", ready)


def table(*engines: EngineInfo, seed: int = 0) -> RoutingTable:
    made = RoutingTable(TextPrefixes(), random.Random(seed), avoid_s=2.0)
    made.replace(engines)
    return made


def chunks(count: int, text: str = "a") -> Prefix:
    return cut(text * CHUNK_CHARS * count)


# -------------------------------------------------------------------- prefixes


@given(st.text(max_size=3000), st.text(max_size=3000))
def test_equal_hashes_are_equal_prefixes(one: str, other: str) -> None:
    for i, (a, b) in enumerate(zip(cut(one), cut(other), strict=False), 1):
        assert (a == b) == (one[: i * CHUNK_CHARS] == other[: i * CHUNK_CHARS])
    assert len(cut(one)) == len(one) // CHUNK_CHARS
    assert not set(cut(one, "salt")) & set(cut(one))


def test_a_prefix_is_bounded() -> None:
    assert len(cut("x" * CHUNK_CHARS * (MAX_CHUNKS + 5))) == MAX_CHUNKS
    assert cut("\ud800" * CHUNK_CHARS)  # a lone half of a pair, as JSON may have it


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2), st.integers(1, 4)), max_size=30),
    st.integers(0, 2),
    st.integers(1, 4),
)
def test_who_holds_a_prefix(saws: list[tuple[int, int, int]], text: int, length: int) -> None:
    prefixes = TextPrefixes()
    names = [engine(f"e{i}") for i in range(6)]
    last: dict[tuple[int, int], list[str]] = {}  # (text, chunk): engines, the latest first
    for who, what, count in saws:
        prefixes.saw(chunks(count, "abc"[what]), names[who])
        for chunk in range(count):
            before = last.get((what, chunk), [])
            last[what, chunk] = [f"e{who}", *(name for name in before if name != f"e{who}")][:HOLDERS]
    held = prefixes.held(chunks(length, "abc"[text]), names)
    for one in names:
        count = 0
        while count < length and one.name in last.get((text, count), []):
            count += 1
        assert held[one.name] == count
    prefixes.check_integrity()


def test_the_tail_is_forgotten_before_the_head() -> None:
    prefixes = TextPrefixes(limit=10)
    one = engine("e")
    prefixes.saw(chunks(8, "a"), one)
    prefixes.saw(chunks(5, "b"), one)
    assert len(prefixes) == 10
    assert prefixes.held(chunks(5, "b"), [one]) == {"e": 5}
    assert prefixes.held(chunks(8, "a"), [one]) == {"e": 5}
    prefixes.check_integrity()


# -------------------------------------------------------------------- the choice


@given(
    st.lists(
        st.tuples(st.sampled_from(EngineRole), st.booleans(), st.integers(0, 5), st.integers(0, 4), st.booleans()),
        max_size=8,
    ),
    st.sets(st.sampled_from(EngineRole)),
    st.sets(st.integers(0, 7)),
    st.booleans(),
    st.integers(0, 99),
)
def test_the_rule(
    engines: list[tuple[EngineRole, bool, int, int, bool]],
    roles: set[EngineRole],
    tried_indices: set[int],
    even_avoided: bool,
    seed: int,
) -> None:
    """Whatever the engines are like: the chosen one may be taken, and none is better by more than SLACK."""
    infos = [engine(f"e{i}", role, ready) for i, (role, ready, *_) in enumerate(engines)]
    made = table(*infos, seed=seed)
    prefix = chunks(4)
    for info, (_, _, load, held, faulty) in zip(infos, engines, strict=True):
        for _ in range(load):
            made.begin(info)
        if faulty:
            made.begin(info)
            made.failed(info, now=10.0)
            made.end(info)
        if held:
            made._residency.saw(prefix[:held], info)
    tried = {f"e{i}" for i in tried_indices}
    chosen = made.choose(roles, prefix, 11.0, tried, even_avoided)
    fit = [e for e in infos if e.ready and e.role in roles and e.name not in tried]
    sound = [e for e in fit if not engines[infos.index(e)][4]]
    among = sound if sound or not even_avoided else fit
    if not among:
        assert chosen is None
        return
    assert chosen in among

    def cost(info: EngineInfo) -> float:
        names: Sequence[str] = [e.name for e, row in zip(infos, engines, strict=True) if row[3]][-HOLDERS:]
        _, _, load, held, _ = engines[infos.index(info)]
        return load + AFFINITY[info.role] * (1 - (held if info.name in names else 0) / 4)

    if sum(1 for row in engines if row[3]) <= HOLDERS:
        assert cost(chosen) <= min(cost(e) for e in among) + SLACK + 1e-9


@given(st.lists(st.integers(0, 6), min_size=3, max_size=8), st.integers(0, 999))
def test_two_are_drawn_among_the_best_only(loads: list[int], seed: int) -> None:
    infos = [engine(f"e{i}") for i in range(len(loads))]
    made = table(*infos, seed=seed)
    for info, load in zip(infos, loads, strict=True):
        for _ in range(load):
            made.begin(info)
    chosen = made.choose(PREFILL, (), 0.0)
    assert chosen is not None and made.in_hand(chosen) <= min(loads) + SLACK


@given(st.integers(1, 8), st.integers(1, 60), st.integers(0, 99))
def test_equal_engines_share_the_load(count: int, requests: int, seed: int) -> None:
    infos = [engine(f"e{i}") for i in range(count)]
    made = table(*infos, seed=seed)
    for _ in range(requests):
        chosen = made.choose(PREFILL, (), 0.0)
        assert chosen is not None
        made.begin(chosen)
    loads = [made.in_hand(info) for info in infos]
    assert max(loads) - min(loads) <= SLACK + 1


def test_a_held_prefix_is_worth_affinity_requests() -> None:
    one, other = engine("e0"), engine("e1")
    made = table(one, other)
    prefix = chunks(4)
    made.begin(one)
    made.worked(one, prefix)
    made.end(one)
    taken = Counter()
    for _ in range(4):
        chosen = made.choose(PREFILL, prefix, 0.0)
        assert chosen is not None
        taken[chosen.name] += 1
        made.begin(chosen)
    # e0 until it has as many in hand as the prefix is worth; then in turns.
    assert taken["e0"] == 3 and taken["e1"] == 1


def test_a_failed_engine_is_avoided_longer_each_time() -> None:
    bad, good = engine("bad"), engine("good")
    made = table(bad, good)
    now, waits = 0.0, []
    for _ in range(8):
        made.begin(bad)
        made.failed(bad, now)
        made.failed(bad, now)  # another request, of the same cause
        made.end(bad)
        wait = next(t for t in range(200) if not made.avoided(bad, now + t))
        waits.append(wait)
        assert made.choose(PREFILL, (), now + wait - 0.1) == good
        now += wait
    assert waits == [2, 4, 8, 16, 32, 60, 60, 60] and waits[-1] == MAX_AVOID_S
    # One at a time finds out how it does, and an answer is a new start.
    made.begin(bad)
    assert made.avoided(bad, now)
    made.worked(bad)
    assert not made.avoided(bad, now)
    made.failed(bad, now)
    assert made.avoided(bad, now + 1.9)
    made.end(bad)
    assert not made.avoided(bad, now + 2)


def test_an_engine_started_anew_is_another() -> None:
    old, new = engine("e", url="http://a:1"), engine("e", url="http://a:2")
    made = table(old)
    made.begin(old)
    made.failed(old, 0.0)
    made.replace([new])
    assert made.choose(PREFILL, (), 0.0, even_avoided=False) == new and made.in_hand(new) == 0
    made.end(old)
    made.check_integrity()


def test_an_end_without_a_begin_is_a_defect() -> None:
    made = table(engine("e"))
    with pytest.raises(IntegrityError):
        made.end(engine("e"))


class Life(RuleBasedStateMachine):
    """Engines come, go and start anew while requests run: counts stay right and nothing is left behind."""

    running = Bundle("running")

    def __init__(self) -> None:
        super().__init__()
        self.table = table()
        self.now = 0.0
        self.open: Counter[EngineInfo] = Counter()

    @rule(names=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1), st.booleans()), max_size=4))
    def replace(self, names: list[tuple[int, int, bool]]) -> None:
        self.table.replace([engine(f"e{n}", ready=ready, url=f"http://e{n}:{port}") for n, port, ready in names])

    @rule(target=running, length=st.integers(0, 3))
    def begin(self, length: int) -> EngineInfo | None:
        chosen = self.table.choose(PREFILL, chunks(length), self.now)
        assert (chosen is None) == (not any(e.ready for e in self.table.engines))
        if chosen is not None:
            assert chosen in self.table.engines
            self.table.begin(chosen)
            self.open[key(chosen)] += 1
        return chosen

    @rule(one=consumes(running), how=st.sampled_from(["worked", "failed", "cancelled"]), wait=st.floats(0, 70))
    def end(self, one: EngineInfo | None, how: str, wait: float) -> None:
        if one is None:
            return
        if how == "worked":
            self.table.worked(one, chunks(2))
        elif how == "failed":
            self.table.failed(one, self.now)
        self.table.end(one)
        self.open[key(one)] -= 1
        self.now += wait

    @invariant()
    def counts(self) -> None:
        self.table.check_integrity()
        for one, count in self.open.items():
            assert self.table.in_hand(one) == count


def key(one: EngineInfo) -> EngineInfo:
    return engine(one.name, url=one.url)


TestLife = Life.TestCase
