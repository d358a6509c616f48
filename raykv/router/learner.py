"""Finds out behind the requests what stores hold of their prompts (`core.residency`). It keeps no request waiting.

Text becomes tokens by an engine's /tokenize, tokens become hashes by an engine's desk, and the Directory says who holds
those. A prompt that can't be learned (images; no engine with tiers, no Directory) is chosen for by its text as before.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from raykv.cluster_messages import EngineInfo
from raykv.core.residency import Learned, LearnedPrompts
from raykv.core.routing import RoutingTable
from raykv.directory_messages import Locate
from raykv.engine_messages import EngineView, Hashed, HashOrder
from raykv.router.flow import DECODES
from raykv.router.prompts import Prompt, tokenize_request
from raykv.router.upstream import EngineFault, Upstream
from raykv.store_messages import HASH_NBYTES

logger = logging.getLogger("raykv")

AT_ONCE = 2
"""Prompts that are being learned: each costs an engine about what it costs to take its request in."""
PER_S = 10.0
"""Prompts that are learned in a second at most; the others wait for their next request."""
BEHIND_S = 0.05
"""What is to be found out begins so much later than the request that brought it, which is at the engines by then."""
TOKENIZE_S = 5.0
LOCATE_S = 0.5
VIEWS_S = 10.0
MAX_ANSWER_NBYTES = 16 << 20


class Cluster(Protocol):
    """What a learner asks, besides the engines. Raises what it likes; a miss costs nothing but a guess."""

    async def views(self) -> Sequence[EngineView]:
        """All engines that tell of themselves. Takes seconds."""
        ...

    async def hash(self, view: EngineView, order: HashOrder) -> Hashed | None:
        """Hashes as that engine makes them."""
        ...

    async def located(self, wanted: Locate, timeout: float) -> Mapping[str, int]:
        """Who is believed to hold a prefix, by node: how many blocks."""
        ...


class Learner:
    """From `start` to `stop`, in one event loop."""

    def __init__(self, prompts: LearnedPrompts, table: RoutingTable, upstream: Upstream, cluster: Cluster) -> None:
        self._prompts, self._table, self._upstream, self._cluster = prompts, table, upstream, cluster
        self._views: Sequence[EngineView] = ()
        self._tasks: set[asyncio.Task[None]] = set()
        self._learning: set[bytes] = set()
        self._next = 0.0
        self._refresh: asyncio.Task[None] | None = None
        self.counts: Counter[str] = Counter()
        """Prompts learned, and look-ups."""

    def start(self) -> None:
        self._refresh = asyncio.create_task(self._keep_views())

    async def stop(self) -> None:
        tasks = [*self._tasks, *([self._refresh] if self._refresh else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def see(self, prompt: Prompt) -> None:
        """A request has come: find out about its prompt, if that is due. Some microseconds; waits for nothing."""
        now = self._prompts.now = time.monotonic()
        if not prompt.prefix or not self._views:
            return
        learned = self._prompts.stale(prompt.prefix)
        if learned is not None:
            self._begin(self._ask(learned))
        last = prompt.prefix[-1]
        if last in self._learning or len(self._learning) >= AT_ONCE or now < self._next:
            return
        if self._prompts.wants(prompt.prefix) and (view := self._view_for(prompt)) is not None:
            self._next = now + 1 / PER_S
            self._learning.add(last)
            self._begin(self._learn(prompt, view))

    def _begin(self, work: Any) -> None:
        task = asyncio.ensure_future(_behind(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _view_for(self, prompt: Prompt) -> EngineView | None:
        model = prompt.fields.get("model")
        fit = (view for view in self._views if view.fingerprints and (model is None or model in view.served))
        return next(fit, None)

    async def _learn(self, prompt: Prompt, view: EngineView) -> None:
        try:
            tokens = await self._tokens(prompt)
            if tokens:
                salt = prompt.fields.get("cache_salt") or ""
                hashed = await self._cluster.hash(view, HashOrder(uuid.uuid4().hex, tuple(tokens), str(salt)))
                if hashed is not None and hashed.hashes:
                    blocks = len(hashed.hashes) // HASH_NBYTES
                    learned = self._prompts.learn(
                        view.served[0] if view.served else "", prompt.prefix, prompt.chars, hashed.hashes, blocks
                    )
                    self.counts["prompts learned"] += 1
                    await self._ask(learned)
        except Exception as error:  # an engine that ended, a Ray that is away: it is chosen by the text
            logger.debug("router: a prompt could not be learned: %s", error)
            self.counts["prompts not learned"] += 1
        finally:
            self._learning.discard(prompt.prefix[-1])

    async def _tokens(self, prompt: Prompt) -> Sequence[int]:
        """The prompt's token ids; empty: they can't be had."""
        wanted = tokenize_request(prompt)
        if not wanted or not isinstance(wanted, bytes):
            return wanted or ()
        engine = self._tokenizer()
        if engine is None:
            return ()
        headers = [("Content-Type", "application/json")]
        try:
            async with (
                asyncio.timeout(TOKENIZE_S),
                self._upstream.answer(engine, "POST", "/tokenize", headers, wanted) as response,
            ):
                body = await self._upstream.whole(engine, response, MAX_ANSWER_NBYTES)
                if response.status != 200:
                    return ()
        except (TimeoutError, EngineFault):
            return ()
        return token_ids(body)

    def _tokenizer(self) -> EngineInfo | None:
        fit = [one for one in self._table.engines if one.ready and one.role in DECODES]
        return min(fit, key=self._table.in_hand, default=None)

    async def _ask(self, learned: Learned) -> None:
        """Who holds it: engines of one model may have different ranks, and so different keys for the same prompt."""
        rows = {view.fingerprints for view in self._views if view.fingerprints and _serves(view, learned.model)}
        held: dict[str, int] = {}
        try:
            for fingerprints in rows:
                # One KV group stands for all: what a sliding window needs besides is a part of it.
                wanted = Locate(tuple(map(bytes.fromhex, fingerprints)), (0,), learned.hashes, "")
                for node, blocks in (await self._cluster.located(wanted, LOCATE_S)).items():
                    held[node] = max(held.get(node, 0), blocks)
            self._prompts.now = time.monotonic()
            self._prompts.answer(learned, held)
            self.counts["look-ups"] += 1
        except Exception as error:
            logger.debug("router: the Directory could not be asked: %s", error)

    async def _keep_views(self) -> None:
        while True:
            try:
                self._views = await self._cluster.views()
            except Exception as error:  # the head is away: what is known stands
                logger.debug("router: the engines' views can't be had: %s", error)
            await asyncio.sleep(VIEWS_S)


async def _behind(work: Any) -> None:
    try:
        await asyncio.sleep(BEHIND_S)
    except asyncio.CancelledError:
        work.close()
        raise
    await work


def _serves(view: EngineView, model: str) -> bool:
    return not model or model in view.served


def token_ids(body: bytes) -> Sequence[int]:
    """Of /tokenize's answer; empty: it is none."""
    try:
        tokens = json.loads(body).get("tokens")
    except (ValueError, AttributeError):
        return ()
    return tokens if isinstance(tokens, list) and all(type(one) is int for one in tokens) else ()
