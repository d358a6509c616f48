"""A model without weights whose KV cache can be checked: every slot holds a fingerprint of the prefix before it.

A forward pass reads all slots that attention would read. If one of them is not the fingerprint that its request's
tokens give, the pass is corrupt: it samples a wrong token and writes garbage, as a real model would. So a block
that was overwritten, loaded wrong or saved wrong ends up in the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

PRIME = 2**31 - 1
VOCABULARY = 500
GARBAGE = -7


def chain(tokens: Sequence[int], start: int = 1) -> list[int]:
    """Fingerprints of the prefixes that end with each of `tokens`; `start` is that of what comes before."""
    values = []
    for token in tokens:
        start = (start * 1_000_003 + token + 1) % PRIME
        values.append(start)
    return values


def slot(fingerprint: int, layer: str, rank: int) -> int:
    """What a layer's KV cache holds of it on a rank."""
    return fingerprint * (int(layer.rpartition(".")[2]) + 1) + rank * 10**15


def slots(values: Sequence[int], layer: str, rank: int) -> torch.Tensor:
    return torch.tensor([slot(value, layer, rank) for value in values], dtype=torch.int64)


def next_token(tokens: Sequence[int]) -> int:
    """What a pass over right slots samples; never 0 to 2."""
    return 3 + chain(tokens)[-1] % (VOCABULARY - 3)


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    """The right answer to a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


@dataclass
class State:
    """A request as vLLM's model runner keeps it."""

    prompt: int
    tokens: list[int]
    blocks: list[list[int]]
    computed: int = 0


@dataclass(repr=False)
class FakeRunner:
    """The state of a model runner, for all ranks at once: what one rank reads wrong spoils the sum of all."""

    groups: Sequence[tuple[Sequence[str], int | None]]
    """By KV group: its layers, and the window if it has one."""
    ranks: int
    num_blocks: int
    block_size: int
    states: dict[str, State] = field(default_factory=dict)
    corrupt: list[tuple[str, int]] = field(default_factory=list)
    """(request, position) of the first wrong slot of each corrupt pass."""

    def __post_init__(self) -> None:
        self.layers = [layer for layers, _ in self.groups for layer in layers]
        self.caches: list[dict[str, torch.Tensor]] = [
            {layer: torch.full((self.num_blocks, self.block_size), GARBAGE, dtype=torch.int64) for layer in self.layers}
            for _ in range(self.ranks)
        ]
        self._previous: set[str] = set()

    def update_states(self, output: Any) -> None:
        """As `GPUModelRunner._update_states` (0.32)."""
        for request in output.finished_req_ids:
            self.states.pop(request, None)
        for new in output.scheduled_new_reqs:
            tokens = list(new.prefill_token_ids or new.prompt_token_ids)
            blocks = [list(ids) for ids in new.block_ids]
            self.states[new.req_id] = State(len(new.prompt_token_ids), tokens, blocks, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for i, request in enumerate(cached.req_ids):
            state = self.states[request]
            state.computed = cached.num_computed_tokens[i]
            wanted = state.prompt + cached.num_output_tokens[i]
            told = cached.all_token_ids.get(request, ())
            if request not in self._previous and len(told) >= wanted:
                state.tokens = list(told)
            del state.tokens[wanted:]
            assert len(state.tokens) == wanted, f"{request}: vLLM counts {wanted} tokens, its worker {state.tokens}"
            new_blocks = cached.new_block_ids[i]
            if request in cached.resumed_req_ids:
                state.blocks = [list(ids) for ids in new_blocks]
            elif new_blocks is not None:
                for have, more in zip(state.blocks, new_blocks, strict=True):
                    have.extend(more)
        self._previous = set(output.num_scheduled_tokens)

    def forward(
        self, scheduled: Mapping[str, int], before_layer: Callable[[str], None], after_layer: Callable[[str], None]
    ) -> dict[str, list[int]]:
        """One pass; returns the sampled tokens by request, `[]` where a prompt is not at its end."""
        spans = {}
        for request, count in scheduled.items():
            state = self.states[request]
            spans[request] = (state, chain(state.tokens), state.computed, state.computed + count)
        bad: set[str] = set()
        for group, (layers, window) in enumerate(self.groups):
            for layer in layers:
                before_layer(layer)
                for request, (state, values, begin, end) in spans.items():
                    first = 0 if window is None else max(0, begin - window + 1)
                    if request not in bad and not self._reads_well(state.blocks[group], values, layer, first, begin):
                        bad.add(request)
                        self.corrupt.append((request, begin))
                    written = [GARBAGE] * (end - begin) if request in bad else values[begin:end]
                    self._write(state.blocks[group], written, layer, begin, request in bad)
                after_layer(layer)
        sampled: dict[str, list[int]] = {}
        for request, (state, _, _, end) in spans.items():
            assert end <= len(state.tokens), f"{request} is scheduled past its tokens"
            sampled[request] = []
            if end == len(state.tokens):
                right = next_token(state.tokens)
                sampled[request] = [right if request not in bad else (right + 1) % VOCABULARY or 3]
                state.tokens.append(sampled[request][0])
        return sampled

    def _reads_well(self, blocks: Sequence[int], values: Sequence[int], layer: str, begin: int, end: int) -> bool:
        if begin >= end:
            return True
        index = torch.arange(begin, end)
        rows = torch.tensor(blocks, dtype=torch.int64)[index // self.block_size]
        return all(
            torch.equal(caches[layer][rows, index % self.block_size], slots(values[begin:end], layer, rank))
            for rank, caches in enumerate(self.caches)
        )

    def _write(self, blocks: Sequence[int], values: Sequence[int], layer: str, begin: int, raw: bool) -> None:
        index = torch.arange(begin, begin + len(values))
        rows = torch.tensor(blocks, dtype=torch.int64)[index // self.block_size]
        for rank, caches in enumerate(self.caches):
            data = torch.tensor(values, dtype=torch.int64) if raw else slots(values, layer, rank)
            caches[layer][rows, index % self.block_size] = data
