"""What is sent to whom, read from the request alone."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raykv.config.cluster_spec import Transport
from raykv.router.answers import Refusal
from raykv.router.prompts import CHAT, COMPLETIONS, Prompt, read_prompt

pytestmark = pytest.mark.process

TEXT = "a prompt"
HELLO = [{"role": "user", "content": TEXT}]
PARAMS = {"do_remote_prefill": True, "remote_block_ids": [[1]]}


def read(fields: dict[str, Any], transport: Transport = Transport.NIXL) -> Prompt:
    path = CHAT if "messages" in fields else COMPLETIONS
    return read_prompt(path, json.dumps(fields).encode(), transport, 0)


@pytest.mark.parametrize(
    ("fields", "by_nixl", "by_tiers"),
    [
        ({"prompt": TEXT}, True, True),
        ({"prompt": [1, 2, 3]}, True, True),
        ({"prompt": [TEXT]}, True, True),
        ({"prompt": [[1, 2, 3]]}, True, True),
        ({"prompt": TEXT, "n": 1, "logprobs": 3, "stop": ["a"], "echo": False}, True, True),
        ({"prompt": TEXT, "max_tokens": None, "stream": True, "suffix": "x"}, True, True),
        ({"prompt": [TEXT, TEXT]}, False, True),
        ({"prompt": [[1], [2]]}, False, True),
        ({"prompt": TEXT, "n": 2}, False, True),
        ({"prompt": TEXT, "n": "2"}, False, True),
        ({"prompt": TEXT, "use_beam_search": True}, False, True),
        ({"prompt": TEXT, "best_of": 4}, False, True),
        ({"prompt": TEXT, "truncate_prompt_tokens": -1}, False, True),
        ({"prompt": TEXT, "echo": True}, False, False),
        ({"prompt": TEXT, "prompt_logprobs": 0}, False, False),
        ({"prompt": TEXT, "prompt_embeds": "AAAA"}, False, False),
        ({"prompt": TEXT, "max_tokens": 0}, False, False),
        ({"prompt": TEXT, "kv_transfer_params": "x"}, False, False),
        ({"prompt": TEXT, "kv_transfer_params": None}, True, True),
        ({"prompt": ""}, False, False),
        ({"prompt": []}, False, False),
        ({"prompt": None}, False, False),
        ({"prompt": {"a": 1}}, False, False),
        ({}, False, False),
        ({"messages": HELLO}, True, True),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": TEXT}]}]}, True, True),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": []}, *HELLO]}, True, True),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, False, True),
        ({"messages": HELLO, "n": 3}, False, True),
        ({"messages": HELLO, "max_completion_tokens": 0}, False, False),
        ({"messages": "hello"}, False, False),
        ({"messages": ["hello"]}, False, True),
    ],
)
def test_which_requests_hop(fields: dict[str, Any], by_nixl: bool, by_tiers: bool) -> None:
    assert (read(fields).alone == "") is by_nixl, read(fields).alone
    assert (read(fields, Transport.TIERS).alone == "") is by_tiers


@pytest.mark.parametrize(
    "key",
    [
        "do_remote_prefill",
        "do_remote_decode",
        "remote_host",
        "remote_block_ids",
        "raykv",
        "raykv_tiers",
        "prompt_token_ids",
        "_x",
    ],
)
def test_a_client_can_not_point_at_blocks(key: str) -> None:
    with pytest.raises(Refusal) as refused:
        read({"prompt": TEXT, "kv_transfer_params": {key: 1}})
    assert refused.value.status == 400 and f"kv_transfer_params.{key}" in refused.value.message


def test_a_clients_other_parameters_reach_both_engines() -> None:
    prompt = read({"prompt": TEXT, "kv_transfer_params": {"lmcache.skip_save": True}})
    assert json.loads(prompt.for_prefill(Transport.NIXL))["kv_transfer_params"]["lmcache.skip_save"] is True
    by_tiers = json.loads(prompt.for_prefill(Transport.TIERS))["kv_transfer_params"]
    assert by_tiers == {"lmcache.skip_save": True, "do_remote_decode": True}
    sent = json.loads(prompt.for_decode(PARAMS))
    assert sent == {"prompt": TEXT, "kv_transfer_params": {"lmcache.skip_save": True, **PARAMS}}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.dictionaries(st.text().filter(lambda key: key != "kv_transfer_params"), json_values, max_size=6),
    st.sampled_from(["", " ", "\n", "\t\r\n"]),
    st.booleans(),
    st.booleans(),
)
def test_the_request_reaches_the_decode_engine_as_it_came(
    fields: dict[str, Any], space: str, ascii_only: bool, sparse: bool
) -> None:
    fields["prompt"] = TEXT
    text = json.dumps(fields, ensure_ascii=ascii_only, indent=2 if sparse else None)
    body = (space + text + space).encode("utf-8", "surrogatepass")
    prompt = read_prompt(COMPLETIONS, body, Transport.NIXL, 0)
    assert prompt.for_decode(None) == body
    if not prompt.fields:
        return  # lone surrogates: no UTF-8, so it is not taken apart
    sent = prompt.for_decode(PARAMS)
    assert sent.startswith(body.rstrip()[:-1])
    assert json.loads(sent) == {**fields, "kv_transfer_params": PARAMS}
    ours = ("stream", "max_tokens", "n", "kv_transfer_params")
    dropped = ("stream_options", "stream_interval", "min_tokens", "logprobs", "top_logprobs", "logprob_token_ids")
    before = {k: v for k, v in fields.items() if k not in (*ours, *dropped, "best_of")}
    assert {k: v for k, v in json.loads(prompt.for_prefill(Transport.NIXL)).items() if k not in ours} == before


def test_a_longer_conversation_begins_like_the_shorter() -> None:
    talk = [{"role": "user", "content": "x" * 2000}]
    more = [*talk, {"role": "assistant", "content": "y" * 2000}, {"role": "user", "content": "z"}]
    short, long = read({"messages": talk}).prefix, read({"messages": more}).prefix
    assert short and long[: len(short)] == short and len(long) > len(short)
    for changed in ({"model": "other"}, {"cache_salt": "s"}, {"tools": [{}]}):
        assert read({"messages": talk, **changed}).prefix[0] != short[0]


def test_a_body_that_is_nested_too_deep_passes() -> None:
    for depth in (900, 5000, 100_000):
        body = b'{"prompt": "p", "x": ' + b"[" * depth + b"]" * depth + b"}"
        prompt = read_prompt(COMPLETIONS, body, Transport.NIXL, 0)
        assert prompt.for_decode(None) == body
