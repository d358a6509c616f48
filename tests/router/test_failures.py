"""Engines that fail, one at a time. `door` checks at each test's end that no blocks were read
twice and that nothing is left in hand."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from raykv.config.cluster_spec import Transport
from tests.router import fake_engine as fakes
from tests.router.fake_engine import TOKENS, Behaviour, Door, FakeEngine, door, drive, engine, says

pytestmark = pytest.mark.process

PROMPT = "Once upon a time " * 40
BODY = {"prompt": PROMPT, "max_tokens": 9}


def text_of(opened: Door, name: str) -> str:
    return "".join(opened[name].token(i) for i in range(TOKENS))


# -------------------------------------------------------------------- prefill

PREFILL_FAULTS = [fakes.dies, says(500), says(503), fakes.dies_in_its_answer, fakes.hangs]


@pytest.mark.parametrize("fault", PREFILL_FAULTS)
def test_another_prefill_engine_takes_over(fault: Behaviour) -> None:
    async def scenario() -> None:
        async with door([engine("p0", fault), engine("p1"), engine("d0")], prefill_timeout_s=0.3) as opened:
            for number in range(8):  # whichever is asked first
                status, answer = await opened.post({"prompt": f"{number} {PROMPT}"})
                assert status == 200 and answer["choices"][0]["text"] == text_of(opened, "d0")
            assert len(opened["d0"].pulled) == 8  # none was computed by the decode engine
            assert len(opened["p0"].seen) <= 1  # it is avoided since

    drive(scenario())


@pytest.mark.parametrize("fault", PREFILL_FAULTS)
def test_without_prefill_engines_the_decode_engine_computes(fault: Behaviour) -> None:
    async def scenario() -> None:
        engines = [engine("p0", fault), engine("p1", fault), engine("p2", fault), engine("d0")]
        async with door(engines, prefill_timeout_s=0.2) as opened:
            status, answer = await opened.post(BODY)
            assert status == 200 and answer["choices"][0]["text"] == text_of(opened, "d0")
            assert sum(len(opened[name].seen) for name in ("p0", "p1", "p2")) == 2  # another one, once
            assert opened["d0"].seen[0].body == BODY
            for _ in range(3):
                assert (await opened.post(BODY))[0] == 200
            assert sum(len(opened[name].seen) for name in ("p0", "p1", "p2")) == 3  # the last one, and then none

    drive(scenario())


def test_prefill_engines_that_are_not_there() -> None:
    async def scenario() -> None:
        async with door([engine("d0")], absent=[engine("p0"), engine("p1")]) as opened:
            for _ in range(5):
                assert (await opened.post(BODY))[0] == 200
            assert all(seen.body == BODY for seen in opened["d0"].seen)

    drive(scenario())


def test_a_prefill_that_is_given_up_is_ended_there() -> None:
    async def scenario() -> None:
        async with door([engine("p0", fakes.hangs), engine("d0")], prefill_timeout_s=0.2) as opened:
            assert (await opened.post(BODY))[0] == 200
            await opened.until(lambda: opened["p0"].aborted == 1)

    drive(scenario())


def test_one_request_finds_out_whether_an_engine_is_back() -> None:
    async def scenario() -> None:
        async with door([engine("p0", fakes.dies), engine("d0")], avoid_s=0.05) as opened:
            assert (await opened.post(BODY))[0] == 200
            opened["p0"].behave = None
            await opened.until(lambda: not opened.app.table.avoided(opened["p0"].info, time.monotonic()))
            assert (await opened.post(BODY))[0] == 200
            assert opened["d0"].pulled == ["p0-1"]

    drive(scenario())


def test_an_answer_without_parameters_is_a_prefill_for_nothing() -> None:
    async def no_params(one: FakeEngine, request: Any, body: dict[str, Any]) -> Any:
        return fakes.web.json_response({"choices": []})

    async def scenario() -> None:
        async with door([engine("p0", no_params), engine("d0")]) as opened:
            assert (await opened.post(BODY))[0] == 200
            assert opened["d0"].seen[0].body == BODY
        # A chat without the token ids, from an older vLLM: its blocks could be another prompt's.
        async with door([engine("p0", old_vllm), engine("d0")]) as opened:
            chat = {"messages": [{"role": "user", "content": PROMPT}]}
            assert (await opened.post(chat, "/v1/chat/completions"))[0] == 200
            assert opened["d0"].seen[0].body == chat

    async def old_vllm(one: FakeEngine, request: Any, body: dict[str, Any]) -> Any:
        return fakes.web.json_response(one.prefilled({**body, "return_token_ids": False}))

    drive(scenario())


# -------------------------------------------------------------------- decode

DECODE_FAULTS = [fakes.dies, fakes.dies_after_the_head, says(500), says(503), fakes.dies_in_its_answer]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", DECODE_FAULTS)
def test_another_decode_engine_takes_over_with_blocks_of_its_own(fault: Behaviour, stream: bool) -> None:
    async def scenario() -> None:
        async with door([engine("p0"), engine("d0", fault), engine("d1")]) as opened:
            for number in range(6):
                body = {**BODY, "prompt": f"{number} {PROMPT}"}
                if stream:
                    status, events = await opened.stream(body)
                    assert events[-1] == "[DONE]"
                    text = "".join(event["choices"][0]["text"] for event in events[:-1])
                else:
                    status, answer = await opened.post(body)
                    text = answer["choices"][0]["text"]
                assert status == 200 and text == text_of(opened, "d1")
            assert len(opened["d0"].seen) <= 1
            assert len(opened["d1"].pulled) == 6

    drive(scenario())


def test_the_engine_that_failed_is_not_the_other_one() -> None:
    """Also where it is not avoided any more when the request comes back."""

    async def scenario() -> None:
        async with door([engine("d0", fakes.dies), engine("d1")], avoid_s=1e-9) as opened:
            for number in range(20):
                status, answer = await opened.post({**BODY, "prompt": f"{number} {PROMPT}"})
                assert status == 200 and answer["choices"][0]["text"] == text_of(opened, "d1")
            assert opened["d0"].seen

    drive(scenario())


def test_by_the_tiers_one_prefill_is_enough() -> None:
    async def scenario() -> None:
        engines = [engine("p0"), engine("d0", fakes.dies), engine("d1")]
        async with door(engines, transport=Transport.TIERS, avoid_s=1e-9) as opened:
            for number in range(10):
                assert (await opened.post({**BODY, "prompt": f"{number} {PROMPT}"}))[0] == 200
            assert opened["d0"].seen and len(opened["p0"].seen) == 10
            hints = [seen.body["kv_transfer_params"] for name in ("d0", "d1") for seen in opened[name].seen]
            assert all(hint == {"raykv_tiers": {"store": "store of p0", "tokens": 64}} for hint in hints)

    drive(scenario())


def test_parameters_that_nobody_saw_are_used_again() -> None:
    async def scenario() -> None:
        async with door([engine("p0"), engine("d1")], absent=[engine("d0")]) as opened:
            for number in range(6):
                assert (await opened.post({**BODY, "prompt": f"{number} {PROMPT}"}))[0] == 200
            assert len(opened["p0"].seen) == 6 == len(opened["d1"].pulled)

    drive(scenario())


@pytest.mark.parametrize("cut", [b"", b'data: {"choi', b'data: {"a": 1}\n'])
def test_a_stream_that_breaks_off_ends_with_one_error(cut: bytes) -> None:
    async def scenario() -> None:
        engines = [engine("p0"), engine("d0", fakes.dies_after(3, cut)), engine("d1", fakes.dies_after(3, cut))]
        async with door(engines) as opened:
            status, events = await opened.stream(BODY)
            *tokens, error, done = events
            name = tokens[0]["choices"][0]["text"][:2]
            assert status == 200 and done == "[DONE]"
            assert [t["choices"][0]["text"] for t in tokens] == [opened[name].token(i) for i in range(3)]
            assert error["error"]["code"] == 502 and name in error["error"]["message"]
            assert len(opened["d0"].seen) + len(opened["d1"].seen) == 1

    drive(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_all_decode_engines_die(stream: bool) -> None:
    async def scenario() -> None:
        async with door([engine("d0", fakes.dies), engine("d1", fakes.dies), engine("d2", fakes.dies)]) as opened:
            status, answer = await opened.post({**BODY, "stream": stream})
            assert status == 502 and answer["error"]["code"] == 502
            assert "broke the connection off" in answer["error"]["message"]
            assert sum(len(one.seen) for one in opened.engines.values()) == 2

    drive(scenario())


def test_the_last_engines_own_error_passes() -> None:
    async def scenario() -> None:
        async with door([engine("d0", says(500, "core is dead"))]) as opened:
            status, answer = await opened.post(BODY)
            assert status == 500 and answer["error"]["message"] == "core is dead"
            assert len(opened["d0"].seen) == 1

    drive(scenario())


def test_a_decode_engine_that_is_silent() -> None:
    async def scenario() -> None:
        async with door([engine("d0", fakes.hangs)], silence_timeout_s=0.2) as opened:
            status, answer = await opened.post(BODY)
            assert status == 504 and "d0" in answer["error"]["message"]
            await opened.until(lambda: opened["d0"].aborted == 1)

    drive(scenario())


# -------------------------------------------------------------------- large answers


def large(die: bool) -> Behaviour:
    async def behave(one: FakeEngine, request: Any, body: dict[str, Any]) -> Any:
        response = fakes.web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": "400000"})
        await response.prepare(request)
        await response.write(b"x" * 300_000)
        if die:
            await asyncio.sleep(0.05)
            return await fakes.dies(one, request, body)
        await response.write(b"y" * 100_000)
        return response

    return behave


def test_a_large_answer_follows_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raykv.router.flow.WHOLE_NBYTES", 1000)

    async def scenario() -> None:
        async with (
            door([engine("d0", large(die=False))]) as opened,
            opened.client.post(opened.url + "/v1/completions", json=BODY) as response,
        ):
            assert await response.read() == b"x" * 300_000 + b"y" * 100_000
        # What has begun is never begun again: the client's connection breaks, as the engine's did.
        async with door([engine("d0", large(die=True)), engine("d1", large(die=True))]) as opened:
            with pytest.raises(fakes.aiohttp.ClientPayloadError):
                async with opened.client.post(opened.url + "/v1/completions", json=BODY) as response:
                    await response.read()
            assert len(opened["d0"].seen) + len(opened["d1"].seen) == 1

    drive(scenario())
