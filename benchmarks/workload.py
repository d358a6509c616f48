"""What each engine is put through, and what is measured of it."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from tests.support.engine import Engine

DECODE_STEPS = 200
PREFILL_TOKENS = 1000
PREFILLS = 10
CROWD = 24
CROWD_TOKENS = 256
CROWD_OUTPUT = 32


@dataclass
class Samples:
    """One engine's measurements; all times in seconds."""

    hooks_decode: list[float] = field(default_factory=list)
    """Worker hooks per step while one request decodes: no load, no save."""
    hooks_save: list[float] = field(default_factory=list)
    """Worker hooks in the step that prefills and saves one prompt."""
    hooks_load: list[float] = field(default_factory=list)
    """Worker hooks in the longest step of a request that loads its prompt."""
    hooks_crowd: list[float] = field(default_factory=list)
    """Worker hooks per step with requests coming and going and saves in flight."""
    scheduler_decode: list[float] = field(default_factory=list)
    """Scheduler hooks per step while one request decodes."""
    step_decode: list[float] = field(default_factory=list)
    """Wall time per output token of that request."""
    ttft_cold: list[float] = field(default_factory=list)
    ttft_warm: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)
    """Prompt and output tokens per second of a crowd without any reuse."""
    loaded: int = 0
    """Prompt tokens that came from a connector in the warm requests."""
    asked: int = 0


PARTS = ("decode", "prefill", "crowd")


class Workload:
    """Random prompts by `seed`: another seed, another run without any reuse of this one."""

    def __init__(self, seed: str, timed: bool, parts: Sequence[str] = PARTS) -> None:
        self._random = random.Random(seed)
        self._timed = timed
        self._parts = parts

    def run(self, engine: Engine) -> Samples:
        samples = Samples()
        for _ in range(2):  # what only the first requests pay
            engine.generate(self._prompt(300), 8)
        self._settle(engine)
        for name, part in zip(PARTS, (self._decode, self._cold_and_warm, self._crowd), strict=True):
            if name in self._parts:
                part(engine, samples)
        return samples

    def _prompt(self, length: int) -> list[int]:
        return [self._random.randrange(4, 260) for _ in range(length)]

    def _settle(self, engine: Engine) -> None:
        engine.forget()
        self._worker(engine)
        self._scheduler(engine)

    def _worker(self, engine: Engine, forward_only: bool = True) -> list[float]:
        """Seconds in all worker hooks of each step since the last call."""
        if not self._timed:
            return []
        (steps,) = engine.call_workers("benchmarks.timed:take")
        # A step without a forward pass holds up nobody.
        return [sum(step.values()) for step in steps if "save_kv_layer" in step or not forward_only]

    def _scheduler(self, engine: Engine) -> list[float]:
        if not self._timed:
            return []
        return [sum(step.values()) for step in engine.call_core("benchmarks.timed:take")]

    def _decode(self, engine: Engine, samples: Samples) -> None:
        result = engine.generate(self._prompt(8), DECODE_STEPS)
        assert result.ttft_s is not None
        samples.step_decode.append((result.total_s - result.ttft_s) / (DECODE_STEPS - 1))
        # The first steps hold the prefill and the look-ups, the last one the end of the request.
        samples.hooks_decode += self._worker(engine)[5 : DECODE_STEPS - 5]
        samples.scheduler_decode += self._scheduler(engine)[5 : DECODE_STEPS - 5]
        self._settle(engine)

    def _cold_and_warm(self, engine: Engine, samples: Samples) -> None:
        prompts = [self._prompt(PREFILL_TOKENS) for _ in range(PREFILLS)]
        for times, hooks in (
            (samples.ttft_cold, samples.hooks_save),
            (samples.ttft_warm, samples.hooks_load),
        ):
            for prompt in prompts:
                result = engine.generate(prompt, 1)
                assert result.ttft_s is not None
                times.append(result.ttft_s)
                if steps := self._worker(engine):
                    hooks.append(max(steps))
                if times is samples.ttft_warm:
                    samples.loaded += result.num_external_tokens or 0
                    samples.asked += len(prompt)
                engine.forget()
                self._settle(engine)

    def _crowd(self, engine: Engine, samples: Samples) -> None:
        prompts = [self._prompt(CROWD_TOKENS) for _ in range(CROWD)]
        begun = time.perf_counter()
        pending = [engine.submit(prompt, CROWD_OUTPUT) for prompt in prompts]
        for request in pending:
            request.result()
        took = time.perf_counter() - begun
        samples.tokens_per_s.append(CROWD * (CROWD_TOKENS + CROWD_OUTPUT) / took)
        samples.hooks_crowd += self._worker(engine)
        self._settle(engine)


def medians(samples: Samples) -> dict[str, float]:
    """One figure per measurement: an engine's own median."""
    return {name: median(values) for name, values in vars(samples).items() if isinstance(values, list) and values}
