"""What vLLM's scheduler plans and holds: a step's output, requests, and the blocks of its pool."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

ANOTHER_CHILDS = b"raykv: loaded by another child"


def filtered_output(output: Any, known: Any) -> Any:
    """`SchedulerOutput` with only the requests that `known(request_id)` accepts (fields as of 0.32).

    A child that was rebuilt while requests were running has never heard of those.
    """
    cached = output.scheduled_cached_reqs
    keep = [i for i, req_id in enumerate(cached.req_ids) if known(req_id)]
    if (
        len(keep) == len(cached.req_ids)
        and all(known(r.req_id) for r in output.scheduled_new_reqs)
        and all(known(req_id) for req_id in output.finished_req_ids)
    ):
        return output
    parallel = {
        field.name: [getattr(cached, field.name)[i] for i in keep]
        for field in dataclasses.fields(cached)
        if isinstance(getattr(cached, field.name), list) and len(getattr(cached, field.name)) == len(cached.req_ids)
    }
    tokens = {req_id: n for req_id, n in output.num_scheduled_tokens.items() if known(req_id)}
    return dataclasses.replace(
        output,
        scheduled_new_reqs=[r for r in output.scheduled_new_reqs if known(r.req_id)],
        scheduled_cached_reqs=dataclasses.replace(
            cached, resumed_req_ids={r for r in cached.resumed_req_ids if known(r)}, **parallel
        ),
        num_scheduled_tokens=tokens,
        total_num_scheduled_tokens=sum(tokens.values()),
        finished_req_ids={r for r in output.finished_req_ids if known(r)},
    )


def pool_blocks(block_pool: Any, block_ids: Sequence[int]) -> list[Any]:
    """The pool's block objects; null blocks are left out, they have no owner (`BlockPool.blocks`, 0.32)."""
    blocks = block_pool.blocks
    return [block for block in (blocks[i] for i in block_ids) if not block.is_null]


def as_if_computed(blocks: Any, end: int, block_sizes: Sequence[int]) -> Any:
    """A `KVCacheBlocks` as a child sees it that was told that the first `end` tokens are computed: their blocks have
    hashes. Several connectors take the blocks without one for theirs (`get_unhashed_block_ids`, 0.32)."""
    groups = []
    for group, block_size in zip(blocks.blocks, block_sizes, strict=True):
        seen = list(group)
        for i, block in enumerate(seen[: end // block_size]):
            if block.block_hash is None and not block.is_null:
                seen[i] = copy.copy(block)  # the real one must not get a hash: it would be found in the prefix cache
                seen[i]._block_hash = ANOTHER_CHILDS
        groups.append(seen)
    return type(blocks)(tuple(groups))


def prompt_tokens(output: Any) -> int:
    """The tokens of prompts that a `SchedulerOutput` has computed (fields as of 0.32): a decode is one token."""
    if output.total_num_scheduled_tokens == len(output.num_scheduled_tokens):
        return 0  # each request has one
    return sum(tokens for tokens in output.num_scheduled_tokens.values() if tokens > 1)


def is_status(request: Any, name: str) -> bool:
    """`request.status` compared by name, so that pure code need not import vLLM's enum."""
    return request.status.name == name
