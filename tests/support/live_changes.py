"""Random changes of two engines' chains and of their store's tiers, as operators may order them."""

from __future__ import annotations

import itertools
import random
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from tests.support.operated import DISK, EXAMPLE, HOST, TIERS, Operated, new_example
from tests.support.waiting import eventually


class Changes:
    """Random changes of both engines' chains and of the store's tiers; some at the same time."""

    def __init__(self, at: Operated, seed: int) -> None:
        self.at, self.dice = at, random.Random(seed)
        self.took: dict[str, list[float]] = {}
        self._number = itertools.count()
        self.paused: dict[str, set[str]] = {name: set() for name in at.engines}
        self.chains: dict[str, list[str]] = {name: [EXAMPLE, TIERS] for name in at.engines}

    def one(self) -> None:
        """One change, done when this returns."""
        kind = self.dice.choice(["add", "remove", "reorder", "pause", "resume", "restart", "resize", "drain", "spot"])
        began = time.perf_counter()
        kind = getattr(self, f"_{kind}")(self.dice.choice(list(self.at.engines))) or kind
        self.took.setdefault(kind, []).append(time.perf_counter() - began)

    def _add(self, engine: str) -> str | None:
        if len(self.chains[engine]) > 3:
            return self._remove(engine) or "remove"
        name = f"more{next(self._number)}"
        before = self.dice.choice(["", *self.chains[engine]])
        self.at.kv.add_child(new_example(self.at.folder / engine / name, name), engine=engine, before=before)
        at = self.chains[engine].index(before) if before else len(self.chains[engine])
        self.chains[engine].insert(at, name)
        return None

    def _remove(self, engine: str) -> str | None:
        more = [name for name in self.chains[engine] if name.startswith("more")]
        if not more:
            return self._add(engine) or "add"
        name = self.dice.choice(more)
        self.at.kv.remove_child(name, engine=engine)
        self.chains[engine].remove(name)
        self.paused[engine].discard(name)
        return None

    def _reorder(self, engine: str) -> None:
        self.dice.shuffle(self.chains[engine])
        self.at.kv.reorder_children(self.chains[engine], engine=engine)

    def _pause(self, engine: str) -> None:
        name = self.dice.choice(self.chains[engine])
        self.at.kv.pause_child(name, engine=engine)
        self.paused[engine].add(name)

    def _resume(self, engine: str) -> str | None:
        if not self.paused[engine]:
            self._pause(engine)
            return "pause"
        self.at.kv.resume_child(name := self.dice.choice(sorted(self.paused[engine])), engine=engine)
        self.paused[engine].discard(name)
        return None

    def _restart(self, engine: str) -> str | None:
        up = [name for name in self.chains[engine] if name not in self.paused[engine] and name != TIERS]
        if not up:
            return self._resume(engine) or "resume"
        self.at.kv.restart_child(self.dice.choice(up), engine=engine)
        return None

    def _resize(self, _: str) -> None:
        medium, most = self.dice.choice([("host", HOST), ("disk", DISK)])
        assert self.at.kv.resize_tier(medium, int(most * self.dice.uniform(0.3, 1.0))).ok

    def _drain(self, _: str) -> None:
        medium = self.dice.choice(["host", "disk"])
        tier = self.at.tier(medium)
        assert self.at.kv.drain_tier(medium).ok
        assert self.at.kv.add_tier(medium, tier.capacity, path=tier.path).ok

    def _spot(self, engine: str) -> str:
        """A tier is taken out and put back while a child pauses."""
        tier = self.at.tier("disk")
        with ThreadPoolExecutor(1) as other:
            pausing = other.submit(self._pause, engine)
            assert self.at.kv.remove_tier("disk").ok
            assert self.at.kv.add_tier("disk", DISK, path=tier.path).ok
            pausing.result()
        return "remove and add a tier"

    def undo(self) -> None:
        """As it was at first."""
        for engine, chain in self.chains.items():
            for name in sorted(self.paused[engine]):
                self.at.kv.resume_child(name, engine=engine)
            for name in [name for name in chain if name.startswith("more")]:
                self.at.kv.remove_child(name, engine=engine)
            self.at.kv.reorder_children([EXAMPLE, TIERS], engine=engine)
            eventually(partial(self._restored, engine), "old chain")
        self.at.kv.resize_tier("host", HOST)
        self.at.kv.resize_tier("disk", DISK)

    def _restored(self, engine: str) -> bool:
        return self.at.chain(engine) == [EXAMPLE, TIERS]
