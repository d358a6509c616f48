"""Random faults under load: whatever happens to the children, the tokens are right and every block comes back."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter

import pytest

from tests.engine.conftest import Offload
from tests.support.prompts import MAX_TOKENS, PROMPTS

pytestmark = [pytest.mark.engine, pytest.mark.ray]

CHILDREN = ("FileChild", "ExampleConnector", "LMCacheMPConnector")


class Load:
    """Requests from a few threads, each answer checked; every eighth request is aborted."""

    def __init__(self, offload: Offload, baseline: dict[str, list[int]], threads: int = 3) -> None:
        self._offload, self._baseline = offload, baseline
        self._stop = threading.Event()
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._threads = [threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    def _run(self, seed: int) -> None:
        rng = random.Random(seed)
        while not self._stop.is_set():
            name = rng.choice(sorted(PROMPTS))
            pending = self._offload.engine.submit(PROMPTS[name], MAX_TOKENS)
            if rng.random() < 1 / 8:
                time.sleep(rng.random() * 0.1)
                self._offload.engine.abort(pending.request_id)
                pending.result()
                self.counts["aborted"] += 1
                continue
            result = pending.result()
            self.counts["finished"] += 1
            if result.token_ids != self._baseline[name]:
                self.wrong.append(f"{name}: {result.token_ids}, not {self._baseline[name]}")

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive(), "a request does not end"


def storm(offload: Offload, baseline: dict[str, list[int]], faults: int, seed: int) -> Counter[str]:
    rng = random.Random(seed)
    load = Load(offload, baseline)
    try:
        for _ in range(faults):
            time.sleep(1 + rng.random() * 4)
            child = rng.choice(CHILDREN)
            if offload.children.pid(child):
                how = rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
                offload.children.kill(child, how)
                load.counts[f"{how.name} {child}"] += 1
            if rng.random() < 0.3:
                offload.engine.reset_prefix_cache()
    finally:
        load.stop()
    assert not load.wrong, load.wrong[:3]
    assert load.counts["finished"] > 0
    offload.engine.wait_free_blocks(offload.all_free, timeout_s=60)
    for child in CHILDREN:
        if not offload.children.pid(child) or not offload.children.metric("child_up", child):
            offload.children.wait_back(child, 0)
    return load.counts


@pytest.mark.timeout(600)
def test_a_few_faults(offload: Offload, baseline: dict[str, list[int]]) -> None:
    storm(offload, baseline, faults=4, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_many_faults(offload: Offload, baseline: dict[str, list[int]]) -> None:
    print(dict(storm(offload, baseline, faults=60, seed=2)))
