"""What a router knows of prompts: by their hashes what stores hold, by their text who saw them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from raykv.cluster_messages import EngineInfo, EngineRole
from raykv.core.residency import MORE_CHUNKS, OLD_S, STALE_S, LearnedPrompts
from raykv.core.routing import CHUNK_CHARS, Prefix, cut
from raykv.store_messages import HASH_NBYTES


def engine(name: str, node: str) -> EngineInfo:
    return EngineInfo(name, EngineRole.DECODE, f"http://{name}", node, True)


A, A2, B = engine("a", "node-a"), engine("a2", "node-a"), engine("b", "node-b")
ENGINES = (A, A2, B)


def text(*parts: str) -> str:
    return "".join(part * CHUNK_CHARS for part in parts)


def learn(prompts: LearnedPrompts, words: str, blocks: int) -> Prefix:
    prefix = cut(words)
    prompts.learn("m", prefix, len(words), bytes(HASH_NBYTES * blocks), blocks)
    return prefix


def test_what_the_store_of_a_node_holds_counts_for_each_of_its_engines() -> None:
    prompts = LearnedPrompts()
    prefix = learn(prompts, text(*"abcdefgh"), 16)
    learned = prompts._at[prefix[-1]][0]
    assert prompts.held(prefix, ENGINES) == {"a": 0, "a2": 0, "b": 0}, "nobody was asked yet"
    prompts.answer(learned, {"node-a": 16, "node-b": 9})
    assert prompts.held(prefix, ENGINES) == {"a": 8, "a2": 8, "b": 4}


def test_a_prompt_that_begins_like_one_that_is_known() -> None:
    prompts = LearnedPrompts()
    prefix = learn(prompts, text(*"abcdefgh"), 16)
    prompts.answer(prompts._at[prefix[-1]][0], {"node-a": 16, "node-b": 2})
    other = cut(text(*"abcdxyz"))
    assert prompts.held(other, ENGINES) == {"a": 4, "a2": 4, "b": 1}
    assert prompts.held(cut(text(*"xbcd")), ENGINES) == {"a": 0, "a2": 0, "b": 0}


def test_who_saw_a_prompt_counts_by_half_once_stores_are_known() -> None:
    prompts = LearnedPrompts()
    prefix = cut(text(*"abcdefgh"))
    prompts.saw(prefix, B)
    assert prompts.held(prefix, ENGINES)["b"] == 8
    learn(prompts, text(*"abcdefgh"), 16)
    assert prompts.held(prefix, ENGINES)["b"] == 8
    prompts.answer(prompts._at[prefix[-1]][0], {"node-a": 16})
    assert prompts.held(prefix, ENGINES) == {"a": 8, "a2": 8, "b": 4}
    prompts.now += OLD_S + 1
    assert prompts.held(prefix, ENGINES) == {"a": 0, "a2": 0, "b": 8}, "too old to go by"


def test_what_is_worth_learning_and_when_it_is_asked_again() -> None:
    prompts = LearnedPrompts()
    words = text(*"abcdefgh")
    assert prompts.wants(cut(words)) and not prompts.wants(cut(words)[: MORE_CHUNKS - 1]) and not prompts.wants(())
    prefix = learn(prompts, words, 16)
    assert not prompts.wants(prefix) and not prompts.wants(cut(words + text(*"xyz")))
    assert prompts.wants(cut(words + text(*"wxyz")))
    assert prompts.stale(prefix) is None, "it is asked for when it is learned"
    prompts.now += STALE_S
    learned = prompts.stale(prefix)
    assert learned is not None and prompts.stale(prefix) is None
    assert prompts.stale(cut(text("z"))) is None


@given(st.lists(st.tuples(st.text("ab", min_size=1, max_size=6), st.integers(0, 20)), max_size=30), st.integers(1, 12))
def test_it_is_bounded_and_a_known_prompt_has_a_known_beginning(prompts_: list[tuple[str, int]], limit: int) -> None:
    prompts = LearnedPrompts(chunks=limit, hashes_nbytes=20 * HASH_NBYTES)
    for letters, blocks in prompts_:
        prefix = learn(prompts, text(*letters), blocks)
        prompts.check_integrity()
        assert len(prompts) <= max(limit, len(prefix))
        known = [chunk in prompts._at for chunk in prefix]
        assert known == sorted(known, reverse=True)
        found = prompts._find(prefix)
        assert (found is None and not any(known)) or (found is not None and found[1] == sum(known))
