"""What an operator's tests look at, and how they wait and measure."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from tests.support.operated import BLOCK, Operated
from tests.support.prompts import PROMPTS
from tests.support.waiting import eventually


def timed(what: str, act: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """How long an operation took is printed: `pytest -s`, and seen where a test fails."""
    began = time.perf_counter()
    answer = act(*arguments, **options)
    print(f"{what}: {time.perf_counter() - began:.2f} s", file=sys.stderr)
    return answer


def whole(name: str) -> int:
    """Tokens of a prompt that are stored: its full blocks, but for what is always computed."""
    return (len(PROMPTS[name]) - 1) // BLOCK * BLOCK


def explained(at: Operated, way: str, request: str, engine: str) -> dict[str, Any]:
    """The explanation of a request, whose sources sum up to its prompt."""
    told: dict[str, Any] = {}

    def ended() -> bool:
        told.update(getattr(at, way)("explain", request, engine=engine))
        return bool(told["ended"])

    eventually(ended, f"end of {request} at the desk")
    assert sum(told["by_source"].values()) == told["prompt_tokens"]
    pieces = [(piece["first"], piece["last"]) for piece in told["pieces"]]
    assert pieces[0][0] == 0 and pieces[-1][1] == told["prompt_tokens"]
    assert all(before[1] == after[0] for before, after in itertools.pairwise(pieces))
    return told


def reasons(told: dict[str, Any]) -> set[str]:
    return {reason["why"] for piece in told["pieces"] for reason in piece["reasons"]}


def media(found: dict[str, Any]) -> set[tuple[str, ...]]:
    """In which tiers the blocks of a looked-up prompt lie."""
    return {tuple(place["media"]) for block in found["blocks"] for place in block["places"]}


def to_disk(at: Operated, name: str) -> None:
    """The prompt lies on the disk only: the host tier is drained, emptied and used again."""
    tier = at.tier("host")
    assert at.kv.drain_tier("host").ok
    assert at.kv.clear(tier="host").ok
    assert at.kv.add_tier("host", tier.capacity).ok


def in_a_shell(*arguments: str) -> str:
    """What a command prints, in a process of its own."""
    command = [sys.executable, "-m", "raykv.cli", *arguments]
    env = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(command, env=env, check=True, timeout=120, stdout=subprocess.PIPE, text=True).stdout


def spoiled_on_disk(at: Operated, name: str) -> None:
    """The prompt lies on the disk only, and of all that lies there every byte is another one now."""
    to_disk(at, name)
    slots = f"{at.tier('disk').path}/raykv.slots"
    with open(slots, "r+b", buffering=0) as file:
        file.write(os.urandom(1 << 20) * (os.path.getsize(slots) >> 20))
        os.fsync(file.fileno())


def tag(salt: str) -> str:
    from raykv.admin_messages import tenant_tag

    return f"tag:{tenant_tag(salt).hex()}"


def as_json(config: dict[str, Any]) -> str:
    return json.dumps(config)


def state(at: Operated) -> Any:
    """What operators can change."""
    store = at.kv.store(at.store_name)
    tiers = [(tier.medium, tier.capacity, tier.draining, tier.off) for tier in store.tiers]
    quotas = [(quota.tenant, quota.quota) for quota in at.kv.quotas() if quota.quota is not None]
    chains = {name: [(c.name, c.state) for c in at.kv.engine(name).children] for name in at.engines}
    return tiers, quotas, store.pins, chains


def attempt(errors: list[str], act: Callable[..., Any], *arguments: Any) -> bool:
    """Whether it was done; else its error is kept."""
    from raykv.errors import RayKVError

    try:
        return bool(act(*arguments).ok)
    except RayKVError as error:
        errors.append(str(error))
        return False


def desk_pid(at: Operated, engine: str) -> int:
    """Of the desk's process; 0 while none answers."""
    import ray

    try:
        actor = ray.get_actor(f"raykv-desk-{engine}", at.kv.namespace)
        return int(ray.get(actor.info.remote(), timeout=10)["pid"])
    except Exception:
        return 0


def store_pid(at: Operated) -> int:
    try:
        return int(at.kv.store(at.store_name).pid)
    except Exception:
        return 0
