"""The learner behind the router, against fake engines and a fake cluster: requests are never kept waiting."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from raykv.cluster_messages import EngineInfo, EngineRole
from raykv.config.cluster_spec import Transport
from raykv.core.residency import LearnedPrompts
from raykv.core.routing import RoutingTable
from raykv.directory_messages import Locate
from raykv.engine_messages import EngineView, Hashed, HashOrder
from raykv.router import learner as module
from raykv.router.learner import Learner
from raykv.router.prompts import CHAT, COMPLETIONS, Prompt, read_prompt, tokenize_request
from raykv.store_messages import HASH_NBYTES
from raykv.types import EngineId

ENGINES = tuple(EngineInfo(name, EngineRole.DECODE, f"http://{name}", f"node-{name}", True) for name in "ab")
BLOCK = 16


def view(ranks: Sequence[str] = ("00" * 16,)) -> EngineView:
    return EngineView(
        EngineId("e"), "path/m", ("m",), "both", 1, "node-a", "h", 0.0, BLOCK, 4096, 1, "compose", (), "s", tuple(ranks)
    )


def prompt(text: str, path: str = COMPLETIONS, **more: Any) -> Prompt:
    asked = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    return read_prompt(path, json.dumps({"model": "m", **asked, **more}).encode(), Transport.TIERS, 512)


@dataclass
class Response:
    status: int
    body: bytes


@dataclass
class Engines:
    """Instead of `Upstream`: a token for each 4 characters."""

    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    status: int = 200

    @asynccontextmanager
    async def answer(self, engine: EngineInfo, method: str, target: str, headers: Any, body: bytes) -> Any:
        assert (method, target) == ("POST", "/tokenize")
        fields = json.loads(body)
        self.asked.append((engine.name, fields))
        text = fields.get("prompt") or fields["messages"][0]["content"]
        tokens = [int.from_bytes(text[at : at + 4].encode(), "big") for at in range(0, len(text), 4)]
        yield Response(self.status, json.dumps({"tokens": tokens}).encode())

    async def whole(self, engine: EngineInfo, response: Response, limit: int) -> bytes:
        return response.body


@dataclass
class FakeCluster:
    """Holds, by node and rank, the blocks of some hashes."""

    held: dict[str, int] = field(default_factory=dict)
    shown: list[EngineView] = field(default_factory=lambda: [view()])
    hashed: list[HashOrder] = field(default_factory=list)
    wanted: list[Locate] = field(default_factory=list)
    broken: bool = False
    gate: asyncio.Event | None = None

    async def views(self) -> Sequence[EngineView]:
        return self.shown

    async def hash(self, view: EngineView, order: HashOrder) -> Hashed | None:
        self.hashed.append(order)
        if self.gate is not None:
            await self.gate.wait()
        if self.broken:
            raise KeyError(view.engine)
        running, found = hashlib.sha256(order.cache_salt.encode()), b""
        for at in range(0, len(order.token_ids) - BLOCK + 1, BLOCK):
            running.update(str(order.token_ids[at : at + BLOCK]).encode())
            found += running.digest()
        return Hashed(order.number, found)

    async def located(self, wanted: Locate, timeout: float) -> Mapping[str, int]:
        self.wanted.append(wanted)
        return {node: min(blocks, len(wanted.hashes) // HASH_NBYTES) for node, blocks in self.held.items()}


Body = Callable[[Learner, LearnedPrompts, RoutingTable, Engines], Awaitable[None]]


def run(cluster: FakeCluster, body: Body) -> None:
    async def inner() -> None:
        prompts, engines = LearnedPrompts(), Engines()
        table = RoutingTable(prompts, random.Random(0))
        table.replace(ENGINES)
        learner = Learner(prompts, table, engines, cluster)  # type: ignore[arg-type]
        learner.start()
        await asyncio.sleep(0)  # the views are here
        await body(learner, prompts, table, engines)
        prompts.check_integrity()
        await learner.stop()

    asyncio.run(inner())


async def settle(learner: Learner) -> None:
    while learner._tasks:
        await asyncio.gather(*learner._tasks)


TEXT = "".join(random.Random(1).choices("abcdef ", k=4096))


@pytest.fixture(autouse=True)
def no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PER_S", 1e9)


def test_the_engine_whose_node_holds_the_prompt_is_chosen_though_it_never_saw_it() -> None:
    cluster = FakeCluster(held={"node-b": 1000})

    async def body(learner: Learner, prompts: LearnedPrompts, table: RoutingTable, engines: Engines) -> None:
        one = prompt(TEXT)
        table.worked(ENGINES[0], one.prefix)  # engine a had it once
        learner.see(one)
        assert table.costs(ENGINES, one.prefix)["a"] == 0, "nothing is waited for"
        await settle(learner)
        costs = table.costs(ENGINES, one.prefix)
        assert costs["b"] == 0 < costs["a"] and learner.counts["prompts learned"] == 1
        assert len(cluster.wanted[0].hashes) == HASH_NBYTES * (4096 // 4 // BLOCK)
        learner.see(prompt(TEXT[:2048]))
        await settle(learner)
        assert len(engines.asked) == 1, "a prompt that begins like it is known already"
        assert table.choose([EngineRole.DECODE], prompt(TEXT[:2048]).prefix, 0.0) == ENGINES[1]

    run(cluster, body)


def test_it_asks_again_and_hears_that_blocks_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeCluster(held={"node-b": 1000})

    async def body(learner: Learner, prompts: LearnedPrompts, table: RoutingTable, engines: Engines) -> None:
        one = prompt(TEXT)
        learner.see(one)
        await settle(learner)
        cluster.held = {"node-a": 32}
        learner.see(one)
        assert not learner._tasks, "asked just now"
        monkeypatch.setattr("raykv.core.residency.STALE_S", 0.0)
        learner.see(one)
        await settle(learner)
        held = prompts.held(one.prefix, ENGINES)
        assert held["b"] == 0 and held["a"] == len(one.prefix) // 2 and len(cluster.hashed) == 1

    run(cluster, body)


def test_engines_of_one_model_with_other_ranks_have_other_keys() -> None:
    cluster = FakeCluster(held={"node-b": 5}, shown=[view(["00" * 16]), view(["11" * 16, "22" * 16]), view([])])

    async def body(learner: Learner, prompts: LearnedPrompts, table: RoutingTable, engines: Engines) -> None:
        learner.see(prompt(TEXT))
        await settle(learner)
        assert {one.fingerprints for one in cluster.wanted} == {(bytes(16),), (b"\x11" * 16, b"\x22" * 16)}

    run(cluster, body)


@pytest.mark.parametrize("what", ["tokenize", "hash", "views", "another model", "short", "image"])
def test_what_can_not_be_learned_changes_nothing(what: str) -> None:
    cluster = FakeCluster(held={"node-b": 1000}, broken=what == "hash")
    if what == "views":
        cluster.shown = []

    async def body(learner: Learner, prompts: LearnedPrompts, table: RoutingTable, engines: Engines) -> None:
        engines.status = 404 if what == "tokenize" else 200
        asked = prompt(TEXT[:900] if what == "short" else TEXT, **({"model": "x"} if what == "another model" else {}))
        if what == "image":
            content = [{"type": "text", "text": TEXT}, {"type": "image_url", "image_url": {"url": "u"}}]
            raw = json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]}).encode()
            asked = read_prompt(CHAT, raw, Transport.TIERS, 512)
        table.worked(ENGINES[0], asked.prefix)
        learner.see(asked)
        await settle(learner)
        assert len(prompts) == 0 and not cluster.wanted
        assert table.costs(ENGINES, asked.prefix)["a"] == 0
        assert not learner._learning

    run(cluster, body)


def test_few_at_once_and_each_prompt_once() -> None:
    async def body(learner: Learner, prompts: LearnedPrompts, table: RoutingTable, engines: Engines) -> None:
        cluster.gate = asyncio.Event()
        for number in range(6):
            for _ in range(2):
                learner.see(prompt(str(number) * 4096))
        assert len(learner._tasks) == module.AT_ONCE
        cluster.gate.set()
        await settle(learner)
        assert len(cluster.hashed) == module.AT_ONCE == len({one.token_ids for one in cluster.hashed})

    cluster = FakeCluster()
    run(cluster, body)


def test_what_an_engine_is_asked_to_tokenize() -> None:
    assert json.loads(bytes(tokenize_request(prompt("hello")))) == {
        "model": "m",
        "prompt": "hello",
        "add_special_tokens": True,
    }
    chat = prompt("hi", CHAT, tools=[{"type": "function"}], temperature=1, chat_template_kwargs={"a": 1})
    assert json.loads(bytes(tokenize_request(chat))) == {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function"}],
        "chat_template_kwargs": {"a": 1},
    }
    ids = read_prompt(COMPLETIONS, b'{"prompt": [[1, 2, 3]]}', Transport.TIERS, 0)
    assert tokenize_request(ids) == [1, 2, 3]
    for bad in (b'{"prompt": ["a", "b"]}', b'{"prompt": "a", "truncate_prompt_tokens": 5}', b"[]", b'{"prompt": 3}'):
        assert not tokenize_request(read_prompt(COMPLETIONS, bad, Transport.TIERS, 0))
    for answer in (b"", b"[]", b'{"tokens": "x"}', b'{"tokens": [1.5]}', b'{"tokens": [true]}'):
        assert module.token_ids(answer) == ()
