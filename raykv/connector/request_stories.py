"""From vLLM's requests and a child's answers to the stories of `core.stories`. EngineCore's thread."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raykv.admin_messages import tenant_tag
from raykv.connector.tier_known import block_key
from raykv.core.load_plan import Answer, Part
from raykv.core.stories import DEFAULT_LAST, Stories
from raykv.core.story import Asked, Took, as_json
from raykv.engine_messages import Why
from raykv.store_messages import Medium
from raykv.types import EngineId, RequestId

if TYPE_CHECKING:
    from vllm.v1.request import Request

EXPLAIN_KEY, STORY_KEY = "raykv_explain", "raykv_story"
"""In a request's `kv_transfer_params` the wish to hear its story, and in the response's the story."""
MOST_ADAPTERS = 256
NOTHING_READ = "the request says that nothing is to be read from a cache"
LATE = "it had not answered when another child's hit was taken"


@dataclass(frozen=True, slots=True)
class TierPart:
    """What a TierConnector knows of a request beyond its answers to vLLM. `media`: of the load that was planned last,
    by block, and `peer`: the node of those from a peer. `why`: of its last look-up, if that is not just all there is.
    `saved`: tokens given to the store."""

    media: tuple[Medium, ...] = ()
    why: Why | None = None
    detail: str = ""
    saved: int = 0
    salt: bytes = b""
    peer: str = ""


class RequestStories(Stories):
    """The stories of one engine's requests."""

    def __init__(self, vllm_config: Any, last: int = DEFAULT_LAST) -> None:
        engine = EngineId(vllm_config.kv_transfer_config.engine_id or "")
        super().__init__(engine, vllm_config.cache_config.block_size, last, key=block_key)
        self.adapters: dict[str, Any] = {}
        """LoRA adapters by name, as requests have brought them: their paths are in the block hashes."""

    def begin(self, request: Request) -> None:
        """vLLM has a new request."""
        lora = request.lora_request
        if lora is not None and lora.lora_name not in self.adapters and len(self.adapters) < MOST_ADAPTERS:
            self.adapters[lora.lora_name] = lora
        self.arrived(
            RequestId(request.request_id),
            request,
            request.num_prompt_tokens,
            explain=is_wanted(request.kv_transfer_params),
            tenant=tenant_tag(request.cache_salt).hex() if request.cache_salt else "",
            skips=NOTHING_READ if request.skip_reading_prefix_cache else "",
        )

    def asks(self, request: Request, computed: int) -> None:
        """vLLM asks for the tokens behind those that it has itself."""
        self.matched(RequestId(request.request_id), computed, request.num_tokens, request.num_preemptions)

    def end(self, request: Request, prefill_rate: float | None = None) -> dict[str, Any] | None:
        """The request has finished, was aborted or has failed. Returns what its client is told, if it asked. (vLLM
        passes that on for requests that finish by themselves only.)"""
        record = self.ended(RequestId(request.request_id), prefill_rate or 0.0)
        return {STORY_KEY: as_json(record.story(self.engine))} if record is not None else None

    def part(self, request: RequestId, child: str, part: TierPart | None) -> None:
        """What a TierConnector has to add at a request's end."""
        if part is not None:
            self.saved(request, child, part.saved)
            self.salted(request, part.salt)

    def saves(self, child: str, meta: Any) -> None:
        """What a hosted child's metadata orders to be saved, where it says for whom (LMCacheMP does)."""
        for one in getattr(meta, "requests", ()) or ():
            record = self._live.get(getattr(one, "request_id", None))  # type: ignore[arg-type]
            if record is not None and getattr(one, "direction", None) == "STORE":
                tokens = max(0, getattr(one.op, "end", 0) - getattr(one.op, "start", 0))
                self.saved(record.request, child, record.saved.get(child, 0) + tokens)


def is_wanted(params: Mapping[str, Any] | None) -> bool:
    """Whether the client wants the story in its response."""
    return isinstance(params, Mapping) and params.get(EXPLAIN_KEY) is True


def without_own(params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters without what is RayKV's alone: no other connector need know it."""
    return {key: value for key, value in params.items() if key not in (EXPLAIN_KEY, STORY_KEY)}


def asked(child: str, answer: Answer | None, refusal: tuple[Why, str] | None, tier: TierPart | None = None) -> Asked:
    """What a child's part in a look-up was. `refusal`: why it could not take part."""
    if refusal is not None:
        return Asked(child, why=refusal[0], detail=refusal[1])
    if answer is None:
        return Asked(child)
    if answer.tokens is None:
        return Asked(child, answer.computed, why=Why.OTHER_CHILD, detail=LATE)
    why = answer.why or Why.NOT_FOUND
    if tier is not None and tier.why is not None and not answer.tokens and answer.why is None:
        return Asked(child, answer.computed, why=tier.why, detail=tier.detail)
    return Asked(child, answer.computed, answer.tokens, answer.unused, why, answer.detail)


def took(child: str, part: Part, tier: TierPart | None, block_size: int) -> list[Took]:
    """A part of a load by its sources: the media of a tier's blocks, or the child."""
    media = tier.media if tier is not None else ()
    peer = tier.peer if tier is not None else ""
    if not media or part.begin % block_size or len(media) * block_size != part.tokens:
        return [Took(part.begin, part.end, child, child)]
    if media.count(media[0]) == len(media):  # most often, and quick
        return [Took(part.begin, part.end, child, str(media[0]), peer if media[0] is Medium.PEER else "")]
    runs, begin = [], part.begin
    for medium, same in itertools.groupby(media):
        end = begin + block_size * sum(1 for _ in same)
        runs.append(Took(begin, end, child, str(medium), peer if medium is Medium.PEER else ""))
        begin = end
    return runs
