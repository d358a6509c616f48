"""What there is, look-ups and nodes, against fakes that hold state."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from raykv.admin_messages import ModelView
from raykv.api import Cluster, NotFoundError, OperationError, Outcome, Progress
from raykv.errors import ConfigError
from raykv.store_messages import Medium
from tests.api.cases import HASHES, LEFT, RIGHT, TOKENS, caller, desk, shown, store
from tests.support.fake_operators import (
    BLOCK,
    PRINT,
    FakeDesk,
    FakeWorld,
)


def test_what_runs(kv: Cluster) -> None:
    snapshot = kv.snapshot()
    assert [node.short for node in snapshot.nodes] == ["a1a1a1a1a1a1", "b2b2b2b2b2b2"]
    assert [engine.id for engine in kv.engines] == ["engine-a", "engine-b"]
    assert kv.nodes[0].engines == ("engine-a",) and kv.nodes[0].stores == (LEFT,)
    engine = kv.engine("engine-a")
    assert [child.name for child in engine.children] == ["nixl", "tiers", "files"]
    assert engine.store == LEFT and engine.desk == "raykv-desk-engine-a"
    [tier, _] = kv.store("default@a1a1").tiers
    assert (tier.medium, tier.capacity, tier.used_nbytes, tier.fill) == ("host", 64 * 4096, 0, 0.0)


def test_everything_shows_itself(kv: Cluster, world: FakeWorld) -> None:
    store(world).put(HASHES[:2], Medium.HOST)
    pin = kv.pin(TOKENS, "10m")
    things: list[Any] = [
        kv.snapshot(), kv.nodes, kv.engines, kv.stores, kv.nodes[0], kv.engines[0], kv.engines[0].children[0],
        kv.stores[0], kv.stores[0].tiers[0], kv.lookup(TOKENS), pin, kv.pins(), kv.quotas(), kv.verify(),
        kv.operations(),
    ]  # fmt: skip
    for thing in things:
        json.dumps(thing.to_dict())
        assert shown(thing).strip() and repr(thing) and "object at" not in repr(thing)
    assert repr(kv.engines[0].children[0]) == "<Child nixl of engine-a: NixlConnector, actor, up>"
    assert repr(kv.stores[0].tiers[0]) == "<Tier host of default@a1a1a1a1a1a1: 256 KiB, 3% full>"
    assert repr(kv) == "<RayKV cluster at 10.0.0.1:6379, namespace raykv>"


def test_text_of_others_is_no_markup(kv: Cluster, world: FakeWorld) -> None:
    store(world).off[Medium.DISK] = "the disk is [red]full[/red]"
    assert "[red]full[/red]" in shown(kv.stores[0])


@pytest.mark.parametrize("name", ["engine-a", "engine-a"[:8], "left"])
def test_an_engine_by_its_names(kv: Cluster, name: str) -> None:
    assert kv.engine(name).id == "engine-a"


def test_names_that_fit_none_or_several(kv: Cluster, world: FakeWorld) -> None:
    with pytest.raises(NotFoundError, match=r'no engine "engin-a". Did you mean "engine-a"'):
        kv.engine("engin-a")
    with pytest.raises(OperationError, match=r"is the beginning or a name of 2 engines: engine-a, engine-b"):
        kv.engine("engine-")
    assert kv.engine().id == "engine-a"  # both share all blocks, so either will do
    world.add_desk(FakeDesk("other", 0, "big"))
    with pytest.raises(OperationError, match=r"There are 3 engines. Say which one is meant: engine-a, engine-b, other"):
        kv.engine()
    with pytest.raises(NotFoundError, match=r"There is no node"):
        kv.node("middle")
    with pytest.raises(NotFoundError, match=r"2 stores have this name"):
        kv.store("default")
    with pytest.raises(NotFoundError, match=r"There is no store"):
        kv.store("defaults")


def test_who_does_not_answer_is_shown_so(kv: Cluster, world: FakeWorld) -> None:
    caller(world, LEFT).silent = True
    caller(world, "raykv-desk-engine-a").dead = True
    desk(world, "engine-b").seen_s = 1800.0
    assert kv.stores[0].problem.endswith("did not answer within 1 s") and not kv.stores[1].problem
    [engine] = kv.engines
    assert engine.problem == "no word from it for 30 m"


def test_closed_once(world: FakeWorld) -> None:
    with Cluster(world) as kv:
        assert kv.nodes
    assert world.closed == 1


# -- look-ups ---------------------------------------------------------------------------------------------------------


def test_lookup_over_all_stores(kv: Cluster, world: FakeWorld) -> None:
    store(world).put(HASHES[:2], Medium.HOST)
    store(world, RIGHT).put(HASHES[1:], Medium.DISK)
    found = kv.lookup(TOKENS, engine="engine-a")
    assert (found.tokens, found.held_blocks, found.held_tokens) == (50, 3, 48)
    assert [[(place.store, place.media) for place in block.places] for block in found.blocks] == [
        [("default@a1a1a1a1a1a1", ("host",))],
        [("default@a1a1a1a1a1a1", ("host",)), ("default@b2b2b2b2b2b2", ("disk",))],
        [("default@b2b2b2b2b2b2", ("disk",))],
    ]
    assert [(run.first, run.last) for run in found.runs] == [(0, 16), (16, 32), (32, 48)]
    assert "The first 48 of 50 tokens are held" in found.said and "disk of default@b2" in shown(found)
    assert kv.lookup(TOKENS, store="@left").held_blocks == 2


def test_lookup_of_what_is_not_there(kv: Cluster, world: FakeWorld) -> None:
    assert kv.lookup(TOKENS).held_tokens == 0
    store(world).put(HASHES[2:], Medium.HOST)
    assert "1 later block of it is" in kv.lookup(TOKENS).said
    assert kv.lookup(TOKENS[:3]).blocks == ()
    store(world).put(HASHES, Medium.HOST)
    assert kv.lookup(TOKENS).held_tokens == 48
    assert kv.lookup(TOKENS, cache_salt="alice").held_tokens == 0  # another tenant's prompt is another one
    caller(world, RIGHT).silent = True
    assert kv.lookup(TOKENS).silent == ("default@b2b2b2b2b2b2",)


def test_a_prompt_of_another_model(kv: Cluster, world: FakeWorld) -> None:
    facts = json.dumps({"hf_config": {"vocab_size": 512}})
    store(world).models[PRINT] = ModelView(PRINT, "tiny", facts, 0, 0)
    with pytest.raises(OperationError, match=r"Token id 99999 is none of tiny, which has 512 of them"):
        kv.lookup([1, 2, 99999])
    with pytest.raises(NotFoundError, match=r'no engine of the model "tine". Did you mean "tiny"'):
        kv.lookup(TOKENS, model="tine")
    world.add_desk(FakeDesk("other", 0, "big"))
    with pytest.raises(OperationError, match=r"Engine engine-a serves tiny-chat, tiny, not .big.*: other"):
        kv.lookup(TOKENS, engine="engine-a", model="big")
    assert kv.lookup(TOKENS, model="tiny-chat").engine == "engine-a"
    with pytest.raises(OperationError, match=r"has 5,000 tokens, and engine engine-a takes 4,096"):
        kv.lookup([1] * 5000, engine="engine-a")


@pytest.mark.parametrize("prompt", [[], "", [1, -2], [True], [1.5], 7, None, [{"role": "user"}, 3], b"abc", ["a"]])
def test_what_is_no_prompt(kv: Cluster, prompt: Any) -> None:
    with pytest.raises(ConfigError, match=r"^prompt"):
        kv.lookup(prompt)


def test_the_engines_own_reason(kv: Cluster, world: FakeWorld) -> None:
    desk(world).hash_error = "There is no adapter 'x'. Valid: y."
    with pytest.raises(OperationError, match=r"There is no adapter 'x'"):
        kv.lookup(TOKENS, engine="engine-a", lora="x")


def test_text_and_messages_by_the_models_own_tokenizer(kv: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    class Tokenizer:
        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [ord(letter) for letter in text]}

        def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> dict[str, list[int]]:
            return self("".join(f"<{one['role']}>{one['content']}" for one in messages))

    asked: list[str] = []
    monkeypatch.setattr("raykv.api.prompts.tokenizer", lambda model: asked.append(model) or Tokenizer())
    assert kv.lookup("x" * 40).tokens == 40
    assert kv.lookup([{"role": "user", "content": "Hello"}]).tokens == 11
    assert asked == ["tiny", "tiny"]


def test_a_tokenizer_that_is_not_here(kv: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(OperationError, match=r"The tokenizer of tiny can't be loaded here .* Give token ids"):
        kv.lookup("Hello")


# -- nodes ------------------------------------------------------------------------------------------------------------


def test_a_node_is_drained_and_used_again(kv: Cluster) -> None:
    heard: list[Progress] = []
    done = kv.drain_node("left", tell=heard.append)
    assert done.said == "Node a1a1a1a1a1a1 is empty: it can be removed." and heard[0].where == "engine e"
    assert kv.node("a1a1").state == "drained"
    assert isinstance(kv.undrain_node("left"), Outcome) and kv.node("a1a1").state == "alive"


def test_blocks_are_those_of_the_engine(kv: Cluster) -> None:
    assert kv.engine("engine-a").block_size == BLOCK
