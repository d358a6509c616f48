"""What the router sends, read by vLLM's own classes: no engine, but the same rules."""

from __future__ import annotations

import json
from typing import Any

import pytest

from raykv.config.cluster_spec import Transport
from raykv.router.prompts import CHAT, COMPLETIONS, read_prompt

pytestmark = pytest.mark.vllm

TEXT = "a prompt " * 10
HELLO = [{"role": "user", "content": TEXT}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
PARAMS = {"do_remote_prefill": True, "remote_block_ids": [[1]], "remote_request_id": "r"}

COMPLETION_FIELDS: list[dict[str, Any]] = [
    {},
    {"max_tokens": 50, "min_tokens": 20, "stop": ["x"], "logprobs": 2},
    {"stream": True, "stream_options": {"include_usage": True}, "stream_interval": 3},
    {"seed": 7, "temperature": 0, "logprobs": 1, "logprob_token_ids": [1, 2]},
    {"response_format": {"type": "json_object"}, "ignore_eos": True, "cache_salt": "s"},
]
CHAT_FIELDS: list[dict[str, Any]] = [
    {},
    {"max_tokens": 50, "max_completion_tokens": 60, "min_tokens": 20},
    {"logprobs": True, "top_logprobs": 3, "stream": True, "stream_options": {"include_usage": True}},
    {"tools": [TOOL], "tool_choice": "required"},
    {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}},
]


def classes() -> tuple[Any, Any]:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    return CompletionRequest, ChatCompletionRequest


@pytest.mark.parametrize("transport", list(Transport))
def test_the_prefill_request_is_one_that_vllm_takes(transport: Transport) -> None:
    completion, chat = classes()
    cases = [(COMPLETIONS, completion, {"prompt": TEXT, **more}) for more in COMPLETION_FIELDS]
    cases += [(CHAT, chat, {"messages": HELLO, **more}) for more in CHAT_FIELDS]
    for path, kind, fields in cases:
        kind(**fields)  # vLLM takes what the client asked
        prompt = read_prompt(path, json.dumps(fields).encode(), transport, 0)
        assert not prompt.alone
        request = kind(**json.loads(prompt.for_prefill(transport)))
        sampling = request.to_sampling_params(1, {})
        assert sampling.max_tokens == 1 and sampling.n == 1 and sampling.min_tokens == 0
        given = (sampling.extra_args or {}).get("kv_transfer_params")
        assert given and given["do_remote_decode"]
        unchanged = {"messages", "prompt", "tools", "tool_choice", "response_format", "cache_salt", "stop", "seed"}
        before = kind(**fields)
        for name in unchanged & set(kind.model_fields):
            assert getattr(request, name) == getattr(before, name), name


def test_the_decode_request_carries_parameters_and_token_ids() -> None:
    from types import SimpleNamespace

    from vllm.renderers.online_renderer import _reused_prompt_token_ids

    completion, chat = classes()
    prompt = read_prompt(CHAT, json.dumps({"messages": HELLO, "max_completion_tokens": 9}).encode(), Transport.NIXL, 0)
    params = prompt.params_from({"kv_transfer_params": PARAMS, "prompt_token_ids": [5, 6]}, Transport.NIXL)
    request = chat(**json.loads(prompt.for_decode(params)))
    renderer: Any = SimpleNamespace(validate_token_ids=lambda ids, parameter: None)
    assert _reused_prompt_token_ids(request, renderer, request.messages) == [5, 6]
    assert request.to_sampling_params(9, {}).extra_args["kv_transfer_params"] == PARAMS

    prompt = read_prompt(COMPLETIONS, json.dumps({"prompt": TEXT}).encode(), Transport.NIXL, 0)
    params = prompt.params_from({"kv_transfer_params": PARAMS}, Transport.NIXL)
    request = completion(**json.loads(prompt.for_decode(params)))
    assert request.to_sampling_params(9, {}).extra_args["kv_transfer_params"] == PARAMS
