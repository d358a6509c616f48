"""From a prompt, as a client writes it, to the token ids and block hashes that an engine knows it by."""

from __future__ import annotations

import contextlib
import functools
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raykv.api.desks import Desk
from raykv.api.errors import OperationError
from raykv.api.objects import Engine, Store
from raykv.api.words import count
from raykv.config.reader import show
from raykv.engine_messages import HashOrder
from raykv.errors import ConfigError
from raykv.store_messages import HASH_NBYTES

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""A text, token ids, or chat messages such as [{"role": "user", "content": "Hello"}]."""
MAX_TOKENS = 10_000_000


@dataclass(frozen=True)
class Hashed:
    """A prompt in one engine: its length, and HASH_NBYTES for each of its full blocks."""

    tokens: int
    block_size: int
    hashes: bytes

    @property
    def blocks(self) -> int:
        """Its full blocks."""
        return len(self.hashes) // HASH_NBYTES


def hashed(
    desk: Desk,
    engine: Engine,
    stores: Sequence[Store],
    prompt: Prompt,
    cache_salt: str,
    lora: str,
    timeout: float,
) -> Hashed:
    """Raises ConfigError or OperationError for what is no prompt of this engine's model."""
    ids = token_ids(prompt, engine)
    check_ids(ids, engine, stores)
    order = HashOrder(f"hash-{secrets.token_hex(8)}", ids, cache_salt, lora)
    hashes = desk.hashes(order, timeout)
    return Hashed(len(ids), engine.block_size, hashes)


def token_ids(prompt: Prompt, engine: Engine) -> tuple[int, ...]:
    """By the model's own tokenizer where it is text; checked where it is ids."""
    if isinstance(prompt, str):
        if not prompt:
            raise ConfigError('prompt is "". It must be a text that is not empty, token ids or chat messages.')
        return tuple(tokenizer(engine.model)(prompt)["input_ids"])
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
        if hasattr(prompt, "tolist"):  # an array
            return token_ids(prompt.tolist(), engine)
        raise ConfigError(f"prompt is {show(prompt)}. It must be a text, a list of token ids, or chat messages.")
    if prompt and all(isinstance(one, Mapping) for one in prompt):
        return _chat(prompt, engine)
    ids: list[Any] = list(prompt)
    if not ids:
        raise ConfigError("prompt is []. It must have at least one token.")
    if len(ids) > MAX_TOKENS:
        raise ConfigError(f"prompt has {len(ids):,} token ids. It can have {MAX_TOKENS:,} at most.")
    for index, one in enumerate(ids):
        if isinstance(one, bool) or not hasattr(one, "__index__") or int(one) < 0:
            raise ConfigError(f"prompt[{index}] is {show(one)}. A token id is a whole number, 0 or more.")
    return tuple(int(one) for one in ids)


def check_ids(ids: Sequence[int], engine: Engine, stores: Sequence[Store]) -> None:
    """Refuse what this engine's model can't be given: a prompt of another model, most likely."""
    most = vocabulary(engine, stores)
    largest = max(ids)
    if most and largest >= most:
        raise OperationError(
            f"Token id {largest} is none of {engine.model}, which has {most:,} of them: the prompt is one of another "
            f"model, or was tokenized for one. Name the engine of that model, or give the prompt as text."
        )
    if engine.max_tokens and len(ids) > engine.max_tokens:
        raise OperationError(
            f"The prompt has {count(len(ids), 'token')}, and engine {engine.id} takes {engine.max_tokens:,} at most. "
            "Give the beginning of it."
        )


def vocabulary(engine: Engine, stores: Sequence[Store]) -> int:
    """How many tokens the model knows, by the facts that a store keeps of it; 0: not known."""
    for store in stores:
        for model in store.models:
            if model.facts and model.fingerprint in engine.fingerprints:
                with contextlib.suppress(ValueError, AttributeError, TypeError):
                    config = json.loads(model.facts)["hf_config"] if "hf_config" in model.facts else {}
                    size = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size") or 0
                    if isinstance(size, int) and size > 0:
                        return size
    return 0


def _chat(messages: Sequence[Any], engine: Engine) -> tuple[int, ...]:
    own = tokenizer(engine.model)
    try:
        # As a dictionary in transformers 5, as a list in 4.
        made = own.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=True)
    except Exception as error:  # a template may raise anything
        raise OperationError(
            f"The chat template of {engine.model} can't be used ({type(error).__name__}: {error}). Give the prompt as "
            "text or token ids, as the engine got it."
        ) from error
    ids = made["input_ids"] if hasattr(made, "keys") else made
    return tuple(int(one) for one in ids)


@functools.lru_cache(maxsize=4)
def tokenizer(model: str) -> Any:
    """The model's own, from its folder or the hub's cache; nothing is fetched. Seconds the first time."""
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(model, local_files_only=True)
    except Exception as error:  # transformers raises what it likes
        raise OperationError(
            f"The tokenizer of {model} can't be loaded here ({type(error).__name__}: {str(error).splitlines()[0]}). "
            "Give token ids, or run this where the model's files are."
        ) from error
