"""A request's way when all engines are sound."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from raykv.config.cluster_spec import Transport
from tests.router import fake_engine as fakes
from tests.router.fake_engine import TOKENS, Door, door, drive, engine, says

pytestmark = pytest.mark.process

PROMPT = "Once upon a time " * 40


async def streamed(opened: Door, body: dict[str, Any], path: str = "/v1/completions") -> bytes:
    async with opened.client.post(opened.url + path, json={**body, "stream": True}) as response:
        assert response.status == 200 and response.content_type == "text/event-stream"
        return await response.read()


def test_prefill_there_decode_here() -> None:
    async def scenario() -> None:
        async with door([engine("p0"), engine("d0")]) as opened:
            body = {"prompt": PROMPT, "max_tokens": 9, "min_tokens": 2, "logprobs": 1, "stop": ["x"]}
            status, answer = await opened.post(body)
            assert status == 200 and answer["choices"][0]["text"].split() == [f"d0.{i}" for i in range(TOKENS)]
            (prefill,), (decode,) = opened["p0"].seen, opened["d0"].seen
            assert prefill.body == {
                **{"prompt": PROMPT, "max_tokens": 1, "n": 1, "stream": False, "stop": ["x"]},
                "kv_transfer_params": {
                    **{"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None},
                    **{"remote_block_ids": None, "remote_host": None, "remote_port": None},
                },
            }
            assert decode.body.pop("kv_transfer_params")["remote_request_id"] == "p0-1"
            assert decode.body == body
            assert opened["d0"].pulled == ["p0-1"]
            assert prefill.headers["x-request-id"] == decode.headers["x-request-id"]

    drive(scenario())


def test_a_stream_passes_unchanged() -> None:
    async def scenario() -> None:
        async with door([engine("p0"), engine("d0")]) as opened:
            got = await streamed(opened, {"prompt": PROMPT, "stream_options": {"include_usage": True}})
            d0 = opened["d0"]
            assert got == b"".join(d0.event(i) for i in range(TOKENS)) + b"data: [DONE]\n\n"
            prefill = opened["p0"].seen[0].body
            assert prefill["stream"] is False and "stream_options" not in prefill
            assert d0.seen[0].body["stream_options"] == {"include_usage": True}

    drive(scenario())


def test_a_chat_takes_the_prefill_engines_tokens() -> None:
    """Its template may say the time: rendered again it may be another prompt."""

    async def scenario() -> None:
        async with door([engine("p0"), engine("d0")]) as opened:
            body = {"messages": [{"role": "user", "content": PROMPT}], "max_completion_tokens": 30, "tools": []}
            status, _ = await opened.post(body, "/v1/chat/completions?a=b")
            assert status == 200
            prefill, decode = opened["p0"].seen[0], opened["d0"].seen[0]
            assert prefill.body["max_completion_tokens"] == prefill.body["max_tokens"] == 1
            assert prefill.body["tools"] == [] and prefill.body["return_token_ids"] is True
            assert decode.body["kv_transfer_params"]["prompt_token_ids"] == [7, 8, 9]
            assert decode.body["max_completion_tokens"] == 30 and "return_token_ids" not in decode.body
            assert decode.path == "/v1/chat/completions?a=b"

    drive(scenario())


@pytest.mark.parametrize("transport", [Transport.TIERS, Transport.FS])
def test_by_the_tiers_a_hint_is_carried(transport: Transport) -> None:
    async def scenario() -> None:
        async with door([engine("p0"), engine("d0")], transport=transport) as opened:
            raw = json.dumps({"prompt": PROMPT, "n": 3}).encode()
            async with opened.client.post(opened.url + "/v1/completions", data=raw) as response:
                assert response.status == 200
            assert opened["p0"].seen[0].body["kv_transfer_params"] == {"do_remote_decode": True}
            assert opened["p0"].seen[0].body["n"] == 1
            hint = {"kv_transfer_params": {"raykv_tiers": {"store": "store of p0", "tokens": 64}}}
            assert opened["d0"].seen[0].raw == raw[:-1] + b"," + json.dumps(hint).encode()[1:]
            # A chat's prompt is rendered again: the decode engine looks for its own.
            body = {"messages": [{"role": "user", "content": PROMPT}]}
            assert (await opened.post(body, "/v1/chat/completions"))[0] == 200
            assert "return_token_ids" not in opened["p0"].seen[1].body
            assert opened["d0"].seen[1].body == {**body, **hint}

    drive(scenario())


def test_by_the_tiers_a_prefill_engine_without_a_hint_is_fine() -> None:
    async def scenario() -> None:
        raw = json.dumps({"prompt": PROMPT}).encode()
        for behave in (fakes.says_nothing, fakes.says(404)):
            async with door([engine("p0", behave), engine("d0")], transport=Transport.TIERS) as opened:
                async with opened.client.post(opened.url + "/v1/completions", data=raw) as response:
                    assert response.status == 200
                assert opened["p0"].seen and opened["d0"].seen[0].raw == raw

    drive(scenario())


def test_an_engine_that_does_both_needs_no_hop() -> None:
    async def scenario() -> None:
        async with door([engine("p0"), engine("b0")]) as opened:
            assert (await opened.post({"prompt": PROMPT}))[0] == 200
            assert not opened["p0"].seen and "kv_transfer_params" not in opened["b0"].seen[0].body

    drive(scenario())


def test_a_short_prompt_needs_no_hop() -> None:
    async def scenario() -> None:
        async with door([engine("p0"), engine("d0")], min_prompt_chars=100) as opened:
            for prompt in ("x" * 99, [1] * 24):
                assert (await opened.post({"prompt": prompt}))[0] == 200
            assert not opened["p0"].seen
            for prompt in ("x" * 100, [1] * 25):
                assert (await opened.post({"prompt": prompt}))[0] == 200
            assert len(opened["p0"].seen) == 2

    drive(scenario())


def test_what_an_engine_says_passes_with_its_status_and_headers() -> None:
    async def scenario() -> None:
        async with door([engine("p0", says(404)), engine("d0", says(404, "no such model"))]) as opened:
            status, answer = await opened.post({"prompt": PROMPT, "model": "x"})
            assert status == 404 and answer["error"]["message"] == "no such model"
            assert not opened["d0"].seen[0].body.get("kv_transfer_params")
            assert not opened.app.table.avoided(opened["p0"].info, 0.0)
        async with door([engine("d0")]) as opened:
            headers = {"X-Request-Id": "mine", "Authorization": "Bearer s"}
            async with opened.client.post(
                opened.url + "/v1/completions", json={"prompt": "x"}, headers=headers
            ) as response:
                assert response.headers.getall("X-Request-Id") == ["mine"]
                assert response.headers["X-Engine"] == "d0"
            assert opened["d0"].seen[0].headers["Authorization"] == "Bearer s"

    drive(scenario())


def test_a_body_that_is_no_json_is_the_engines_to_refuse() -> None:
    async def scenario() -> None:
        async with door([engine("p0"), engine("d0")]) as opened:
            for raw in (b"{", b"[]", b"\xff\xfe", b""):
                async with opened.client.post(opened.url + "/v1/completions", data=raw) as response:
                    assert response.status == 200
            assert [seen.raw for seen in opened["d0"].seen] == [b"{", b"[]", b"\xff\xfe", b""]
            assert not opened["p0"].seen

    drive(scenario())


def test_the_same_prefix_goes_to_the_same_prefill_engine() -> None:
    async def scenario() -> None:
        async with door([engine(name) for name in ("p0", "p1", "p2", "d0")]) as opened:
            for turn in range(10):
                assert (await opened.post({"prompt": PROMPT + "x" * 300 * turn}))[0] == 200
            assert sorted(len(opened[name].seen) for name in ("p0", "p1", "p2")) == [0, 0, 10]

    drive(scenario())


def test_other_paths() -> None:
    async def scenario() -> None:
        async with door([engine("p0"), engine("d0")]) as opened:
            async with opened.client.get(opened.url + "/health") as response:
                assert response.status == 200
            async with opened.client.get(opened.url + "/v1/models?x=1") as response:
                assert response.status == 200
            assert opened["d0"].seen[0].path == "/v1/models?x=1"
            assert (await opened.post({"prompt": "x"}, "/tokenize"))[0] == 200
            for path in ("/sleep", "/reset_prefix_cache", "/v1/load_lora_adapter", "/v1/../sleep", "//sleep"):
                status, answer = await opened.post({}, path)
                assert status == 404 and answer["error"]["code"] == 404
            async with opened.client.get(opened.url + "/v1/completions") as response:
                assert response.status == 405
            async with opened.client.get(opened.url + "/metrics") as response:
                text = await response.text()
            assert 'raykv_router_answers_total{path="/tokenize",status="200"} 1' in text
            assert not opened["p0"].seen

    drive(scenario())


def test_a_body_that_is_too_large_is_refused() -> None:
    async def scenario() -> None:
        async with door([engine("d0")], max_body_nbytes=2048) as opened:
            status, answer = await opened.post({"prompt": "x" * 2048})
            assert status == 413 and "max_body_nbytes" in answer["error"]["message"]

            async def pieces() -> Any:
                for _ in range(30):
                    yield b"x" * 100

            async with opened.client.post(opened.url + "/v1/completions", data=pieces()) as response:
                assert response.status == 413
            assert not opened["d0"].seen

    drive(scenario())


def test_many_at_once_never_mix() -> None:
    async def scenario() -> None:
        async with door([engine(name) for name in ("p0", "p1", "d0", "d1", "d2")]) as opened:
            got = await asyncio.gather(*(streamed(opened, {"prompt": f"{i} {PROMPT}"}) for i in range(60)))
            whole = [
                b"".join(opened[name].event(i) for i in range(TOKENS)) + b"data: [DONE]\n\n"
                for name in ("d0", "d1", "d2")
            ]
            assert all(one in whole for one in got)
            assert all(opened[name].seen for name in ("p0", "p1", "d0", "d1", "d2"))
            assert sum(len(opened[name].pulled) for name in ("d0", "d1", "d2")) == 60

    drive(scenario())
