"""One generation request, read once: does a prefill on another engine fit it, and what is sent to whom.

The hop must never change the answer. By the tiers it can't: the decode engine looks blocks up by their hash, and what
the prefill engine says of them (which store gets how much) is a hint that can cost time and nothing else. By NIXL
it reads blocks by their number and trusts that they are those of its prompt, so what follows is left to the decode
engine alone (read from vLLM 0.32):

- `n` above 1, beam search and several prompts: vLLM makes a request of each, all with the same parameters. Each would
  read the same remote blocks, and the first read frees them.
- `truncate_prompt_tokens`: how much is cut off depends on `max_tokens`, which is 1 on the prefill engine.
- images, audio and embeddings: what they stand for may differ when it is fetched twice.
- `prompt_logprobs` and `echo`: the decode engine must compute the prompt itself to have them.

A chat's prompt is made by a template, which may say the time: so the prefill engine's token ids travel with the
parameters, and the decode engine uses them instead of rendering again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raykv.config.cluster_spec import Transport
from raykv.core.routing import Prefix, cut
from raykv.router.answers import Refusal

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"

REMOTE_DECODE: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What vLLM's NixlConnector wants to hear on the prefill side."""
HAND_OVER: Mapping[str, Any] = {"do_remote_decode": True}
"""What makes RayKV's TierConnector say what it has saved."""
PARAMS = "kv_transfer_params"

# A client that could set these could read other clients' blocks, or make an engine call any address.
RESERVED = (
    "do_remote_",
    "remote_",
    "raykv",
    "prompt_token_ids",
    "transfer_mode",
    "tp_size",
    "pp_size",
    "dcp_size",
    "_",
)

# Of no use for one token that nobody reads, and some are refused beside max_tokens=1 or without a stream. All else
# stays: a model's template may read it (`tools`, `response_format`), and the prompt must be the same.
NOT_FOR_PREFILL = frozenset(
    {"stream_options", "stream_interval", "min_tokens", "logprobs", "top_logprobs", "logprob_token_ids", "best_of"}
)
CHARS_PER_TOKEN = 4
CHAT_PROMPT = (
    "model",
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
)
"""What decides a chat's prompt, of what /tokenize takes (vLLM 0.32)."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request for tokens."""

    body: bytes
    fields: Mapping[str, Any]
    """Empty: the body is no JSON object. The engine says so itself."""
    is_chat: bool
    alone: str
    """Why the decode engine computes the prompt itself; empty: a prefill engine may."""
    prefix: Prefix
    chars: int = 0
    """Of the text that `prefix` is made of."""

    def for_prefill(self, transport: Transport) -> bytes:
        """The request that computes the prompt and as good as nothing else."""
        fields = {key: value for key, value in self.fields.items() if key not in NOT_FOR_PREFILL}
        fields |= {"stream": False, "max_tokens": 1, "n": 1}
        if self.is_chat:
            fields["max_completion_tokens"] = 1
        if transport is Transport.NIXL:
            fields[PARAMS] = {**(fields.get(PARAMS) or {}), **REMOTE_DECODE}
            if self.is_chat:
                fields["return_token_ids"] = True
        else:
            fields[PARAMS] = {**(fields.get(PARAMS) or {}), **HAND_OVER}
        return json.dumps(fields).encode()

    def for_decode(self, params: Mapping[str, Any] | None) -> bytes:
        """The request as it came, with these parameters if there are any."""
        if params is None:
            return self.body
        if PARAMS in self.fields:
            merged = {**(self.fields[PARAMS] or {}), **params}
            return json.dumps({**self.fields, PARAMS: merged}).encode()
        # Not taken apart and put together again: what the client wrote stays as it was, to the byte.
        return self.body.rstrip()[:-1] + b"," + json.dumps({PARAMS: params}).encode()[1:]

    def params_from(self, answer: Mapping[str, Any], transport: Transport) -> dict[str, Any] | None:
        """What the decode engine needs to know, from a prefill engine's answer; None: there is nothing to fetch."""
        params = answer.get(PARAMS)
        if not isinstance(params, dict) or not params:
            return None
        if self.is_chat and transport is Transport.NIXL:
            ids = answer.get("prompt_token_ids")
            if not isinstance(ids, list) or not ids:
                return None
            params = {**params, "prompt_token_ids": ids}
        return params


def read_prompt(path: str, body: bytes, transport: Transport, min_chars: int) -> Prompt:
    """Read the body of a request to COMPLETIONS or CHAT. Raises Refusal (400) for what a client may not ask."""
    is_chat = path == CHAT
    try:
        fields = json.loads(body.decode())
    except (UnicodeDecodeError, ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        return Prompt(body, {}, is_chat, "the body is no JSON object", ())
    _refuse_reserved(fields.get(PARAMS))
    alone = _why_alone(fields, is_chat)
    if not alone and transport is Transport.NIXL:
        alone = _why_not_remote(fields, is_chat)
    try:
        text, chars = _text(fields, is_chat)
        salt = json.dumps([fields.get("model"), fields.get("cache_salt")])
    except RecursionError:
        return Prompt(body, fields, is_chat, "it is nested too deep", ())
    if not alone and chars < min_chars:
        alone = f"the prompt has less than {min_chars} characters"
    return Prompt(body, fields, is_chat, alone, cut(text, salt), len(text))


def tokenize_request(prompt: Prompt) -> bytes | list[int]:
    """What to ask an engine's /tokenize for the prompt's tokens, or the tokens themselves; empty: neither can be."""
    fields = prompt.fields
    if fields.get("truncate_prompt_tokens"):
        return b""
    if prompt.is_chat:
        messages = fields.get("messages")
        if not isinstance(messages, list) or not all(_only_text(message) for message in messages):
            return b""
        return json.dumps({key: fields[key] for key in CHAT_PROMPT if fields.get(key) is not None}).encode()
    text = _only(fields.get("prompt"))
    if isinstance(text, list):
        return text if all(type(token) is int for token in text) else b""
    if not isinstance(text, str):
        return b""
    wanted = {"prompt": text, "add_special_tokens": fields.get("add_special_tokens", True)}
    if fields.get("model") is not None:
        wanted["model"] = fields["model"]
    return json.dumps(wanted).encode()


def _refuse_reserved(params: Any) -> None:
    for key in params if isinstance(params, dict) else ():
        if key.startswith(RESERVED):
            raise Refusal(400, f"{PARAMS}.{key} is set by the router. Leave it out.", "BadRequestError")


def _text(fields: Mapping[str, Any], is_chat: bool) -> tuple[str, int]:
    """What stands for the prompt, and its length: of two requests, one prompt begins with the other where this does."""
    if is_chat:
        # Tools come first, as in most templates. Without the last brackets a longer conversation begins like this one.
        text = json.dumps([fields.get("tools"), fields.get("messages")], ensure_ascii=False)[:-2]
        return text, len(text)
    prompt = _only(fields.get("prompt"))
    if isinstance(prompt, str):
        return prompt, len(prompt)
    if isinstance(prompt, list):
        return ",".join(map(str, prompt)), CHARS_PER_TOKEN * len(prompt)
    return "", 0


def _only(prompt: Any) -> Any:
    """A list with one prompt in it is that prompt."""
    return prompt[0] if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list) else prompt


def _why_alone(fields: Mapping[str, Any], is_chat: bool) -> str:
    """What a hop is of no use for, however the blocks travel."""
    if not isinstance(fields.get(PARAMS), dict | None):
        return f"{PARAMS} is no object"
    for key in ("prompt_logprobs", "prompt_embeds"):
        if fields.get(key) is not None:
            return key
    if fields.get("echo"):
        return "echo"
    if 0 in (fields.get("max_tokens"), fields.get("max_completion_tokens")):
        return "no tokens are wanted"
    asked = fields.get("messages" if is_chat else "prompt")
    if not isinstance(asked, list if is_chat else str | list) or not asked:
        return "there is no prompt"
    return ""


def _why_not_remote(fields: Mapping[str, Any], is_chat: bool) -> str:
    """What reading another engine's blocks by their number is not safe for."""
    if fields.get("n") not in (None, 1):
        return "n"
    for key in ("use_beam_search", "truncate_prompt_tokens", "best_of"):
        if fields.get(key):
            return key
    if is_chat:
        return "" if all(_only_text(message) for message in fields["messages"]) else "content that is not text"
    prompt = _only(fields["prompt"])
    if isinstance(prompt, list) and not all(type(token) is int for token in prompt):
        return "several prompts"
    return ""


def _only_text(message: Any) -> bool:
    if not isinstance(message, dict):
        return False
    content = message.get("content")
    if not isinstance(content, list):
        return content is None or isinstance(content, str)
    return all(isinstance(part, str) or isinstance(part, dict) and part.get("type") == "text" for part in content)
