"""What an operator and a running engine tell each other, by way of the engine's desk: plain frozen records.

A desk (`actors.engine_desk`) is a named actor beside each engine. Operators leave orders there; a thread in EngineCore
fetches them, has them carried out between two steps, and brings back views, stories and the orders' states. All times
are seconds since the epoch unless they say otherwise.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from raykv.types import EngineId, RequestId

# -- orders -----------------------------------------------------------------------------------------------------


class ChildOp(enum.StrEnum):
    """What may be done to the chain of a running engine."""

    ADD = "add"
    REMOVE = "remove"
    PAUSE = "pause"
    RESUME = "resume"
    RESTART = "restart"
    REORDER = "reorder"


@dataclass(frozen=True, slots=True)
class ChainOrder:
    """One change of an engine's chain.

    `number` is chosen by who orders and makes a repeat harmless: a number that is known is answered by its state and
    not carried out again. `config`: for ADD the child's JSON, as in the `connectors` list. `names`: for REORDER all
    children, first asked first. `before`: for ADD the child in front of which the new one goes; empty: the end.
    """

    number: str
    op: ChildOp
    child: str = ""
    config: str = ""
    names: tuple[str, ...] = ()
    before: str = ""


class Progress(enum.StrEnum):
    """How far an order has come. The last three are final."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    REFUSED = "refused"  # nothing was changed; `detail` says why and what to do
    FAILED = "failed"  # begun, and could not be ended as wanted; `detail` says what is left

    @property
    def final(self) -> bool:
        """Whether nothing more happens."""
        return self in (Progress.DONE, Progress.REFUSED, Progress.FAILED)


@dataclass(frozen=True, slots=True)
class OrderState:
    """An order and how far it has come. `detail` is a sentence for people: what was done, or what is waited for."""

    number: str
    progress: Progress
    detail: str = ""
    since: float = 0.0


# -- what is seen of an engine ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChildView:
    """A child as its engine sees it. `state`: up, down, paused, off (by an operator), starting, leaving.

    `counters` are totals since the engine started, by the names of `connector.stats`. `config`: its JSON.
    """

    name: str
    connector: str
    run: str
    state: str
    loads: bool
    saves: bool
    incarnation: int
    host_pids: tuple[int, ...] = ()
    counters: dict[str, int] = field(default_factory=dict)
    config: str = ""


@dataclass(frozen=True, slots=True)
class EngineView:
    """An engine at one moment; `children` in the order in which they are asked.

    `model` as vLLM was given it, `served` the names clients use. `name`: its replica's, where `raykv up` started it.
    `store`: the actor name of the store that its TierConnector uses, "" without one; `fingerprints`: of its writing
    ranks there, in hexadecimal, by rank.
    `prefill_rate` tokens/s computed and `load_rates` tokens/s by child, as measured; 0 or absent: not yet known.
    `tokens`: prompt tokens by source since the start: "gpu" (vLLM's own prefix cache), a medium, a hosted child's
    name, "computed", "not run" (the request ended before). Their sum is all prompt tokens of the requests that ended.
    """

    engine: EngineId
    model: str
    served: tuple[str, ...]
    role: str
    pid: int
    node: str
    host: str
    started: float
    block_size: int
    max_tokens: int
    ranks: int
    load_policy: str
    children: tuple[ChildView, ...]
    store: str = ""
    fingerprints: tuple[str, ...] = ()
    groups: int = 1
    prefill_rate: float = 0.0
    load_rates: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    running: int = 0
    seen: float = 0.0
    name: str = ""


# -- where a request's tokens came from ---------------------------------------------------------------------------


class Why(enum.StrEnum):
    """Why tokens were not loaded. The first six are the engine's to say, the others the store's (`store.why`)."""

    NOT_ASKED = "not asked"  # the prompt is shorter than a block, or says that nothing is to be read
    TIMED_OUT = "timed out"  # the child did not answer in time
    CHILD_OFF = "child off"  # down, paused or taken out
    COST = "below the cost line"  # recompute was estimated to be quicker
    FAILED = "load failed"  # tried, failed, recomputed
    OTHER_CHILD = "another child took it"  # a hit that was not needed
    NOT_FOUND = "not found"  # the child said that it has no more; a hosted child can't say why
    NEVER_STORED = "never stored"
    EVICTED = "evicted"
    EXPIRED = "expired"
    CLEARED = "cleared"
    CORRUPT = "failed its check"
    OTHER_FINGERPRINT = "other fingerprint"
    OVER_QUOTA = "over quota"
    NO_ROOM = "no room when it was to be saved"
    ALWAYS_COMPUTED = "always computed"  # the last token of a prompt, and what fills no block


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Tokens [first, last) of a prompt and their source, as in `EngineView.tokens`. `child` "" for gpu and computed.

    `node`: of a peer's tier the node it came from, where that is known.
    """

    first: int
    last: int
    source: str
    child: str = ""
    node: str = ""


@dataclass(frozen=True, slots=True)
class Missed:
    """Tokens [first, last) that a child did not bring, and why. `detail` for people: when evicted, which field."""

    first: int
    last: int
    child: str
    why: Why
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Story:
    """What RayKV did for one request. `ranges` cover [0, prompt_tokens) without gaps; `missed` says why of what was
    computed, by child, and may overlap.

    Seconds: `lookup_s` from arrival to the last child's answer, `load_s` the loads from plan to end,
    `recompute_s` what the loaded tokens would have taken at the measured prefill rate (0: not known).
    `hashes`: vLLM's hashes of the prompt's full blocks, concatenated (HASH_NBYTES each), for `store.why`.
    `ended`: 0 while the request runs. `tenant`: its cache salt's tag (`admin_messages.tenant_tag`), "" without one.
    """

    request: RequestId
    engine: EngineId
    arrived: float
    prompt_tokens: int
    ranges: tuple[TokenRange, ...]
    missed: tuple[Missed, ...] = ()
    lookup_s: float = 0.0
    load_s: float = 0.0
    recompute_s: float = 0.0
    saved_tokens: dict[str, int] = field(default_factory=dict)
    preemptions: int = 0
    ended: float = 0.0
    tenant: str = ""
    hashes: bytes = b""


# -- questions to an engine ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HashOrder:
    """Which block hashes has a prompt of these tokens in this engine? `lora`: an adapter's name the engine knows."""

    number: str
    token_ids: tuple[int, ...]
    cache_salt: str = ""
    lora: str = ""


@dataclass(frozen=True, slots=True)
class Hashed:
    """The answer: HASH_NBYTES for each full block, concatenated. `error`: why there is none, and what to do."""

    number: str
    hashes: bytes = b""
    error: str = ""


# -- a desk's stream, and its errands ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EngineEvent:
    """Something has changed: `what` is "child" or "order", `name` the child or the order's number, `state` as in
    ChildView or Progress ("gone": the child was taken out). A gap in the numbers says that the oldest ones are lost.
    """

    number: int
    at: float
    what: str
    name: str
    state: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Errands:
    """What operators have left at a desk for its engine: orders, questions for hashes, and running requests (by id) of
    which a story is wanted."""

    orders: tuple[ChainOrder, ...] = ()
    hashes: tuple[HashOrder, ...] = ()
    stories: tuple[str, ...] = ()
