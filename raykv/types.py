"""The ids of RayKV. Different ids are different types, so that mypy sees when one is taken for another."""

from typing import NewType

ChildName = NewType("ChildName", str)
"""A child connector of one engine, unique in it: `[A-Za-z0-9_.-]+`."""

RequestId = NewType("RequestId", str)
"""vLLM's id of a request, unique in one engine."""

EngineId = NewType("EngineId", str)
"""An engine as other engines know it: vLLM's `engine_id`."""

StepId = NewType("StepId", int)
"""A step of one engine's scheduler, counted up by RayKV from 0."""

Rank = NewType("Rank", int)
"""A worker of one engine, 0 to its number of workers - 1."""

Attempt = NewType("Attempt", int)
"""How often a request was given to a child for a load, from 0; a report of an older attempt is late."""

Incarnation = NewType("Incarnation", int)
"""A life of a host, store or child, counted up at each restart; a report of an older incarnation is late."""

BlockId = NewType("BlockId", int)
"""A block's place in the engine's paged KV cache; its owner changes over time."""

StoreLife = NewType("StoreLife", str)
"""One life of a node's store, from the start of its process to its end: unique."""

JobId = NewType("JobId", int)
"""A copy job of one engine, counted up by its scheduler half from 0; the same on every rank."""

LeaseId = NewType("LeaseId", int)
"""A promise of one life of a store not to evict some blocks; remote, and it expires."""

NODE_CHARS = 12
"""So many letters of a Ray node's id stand for it: in the names of engines, stores and their memory, in metrics, for
people."""
