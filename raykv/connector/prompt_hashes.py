"""The hashes that an engine gives to a prompt's blocks: vLLM's own, as the engine makes them for its requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vllm import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request

from raykv.connector.tier_known import block_key
from raykv.engine_messages import Hashed, HashOrder

KeySalt = Callable[[bool], bytes]
"""What a store's keys are salted with, for a request with an adapter or without."""


def no_salt(lora: bool) -> bytes:
    """Where there is no TierConnector."""
    return b""


class PromptHashes:
    """One engine's. Any thread but EngineCore's: about 10 us a block, most of it with the interpreter's lock."""

    def __init__(
        self, vllm_config: Any, kv_cache_config: Any, adapters: Mapping[str, Any], key_salt: KeySalt = no_salt
    ) -> None:
        """`adapters`: LoRA requests by name, as the engine has seen them."""
        self._config, self._kv_cache_config = vllm_config, kv_cache_config
        self._adapters, self._key_salt = adapters, key_salt
        self._hasher: Any = None

    def answer(self, order: HashOrder) -> Hashed:
        """Never raises: what can't be hashed has an error with the fix."""
        try:
            problem = self._problem(order)
            if problem:
                return Hashed(order.number, error=problem)
            return Hashed(order.number, b"".join(self._keys(order)))
        except Exception as error:
            return Hashed(order.number, error=f"The engine could not hash the prompt: {type(error).__name__}: {error}.")

    def _problem(self, order: HashOrder) -> str:
        model = self._config.model_config
        tokens, most, vocabulary = order.token_ids, model.max_model_len, model.get_vocab_size()
        if not tokens:
            return "The prompt has no tokens. Give one token at least."
        if len(tokens) > most:
            return f"The prompt has {len(tokens)} tokens, and this engine takes {most} (max_model_len). Shorten it."
        wrong = next((one for one in tokens if type(one) is not int or not 0 <= one < vocabulary), None)
        if wrong is not None:
            return (
                f"Token {wrong!r:.40} is none of the model {model.model}, which has 0 to {vocabulary - 1}. Use this "
                "model's tokenizer."
            )
        if order.lora and order.lora not in self._adapters:
            known = ", ".join(sorted(self._adapters)) or "none yet"
            return (
                f"The adapter {order.lora!r} is not known to this engine ({known}): it learns one from the first "
                "request that uses it. Check the name, or send a request with it first."
            )
        if not hasattr(kv_cache_utils, "NONE_HASH"):
            return "The engine is still starting. Ask again when it serves."
        return ""

    def _keys(self, order: HashOrder) -> list[bytes]:
        request = Request(
            order.number,
            list(order.token_ids),
            SamplingParams(max_tokens=1),
            None,
            lora_request=self._adapters[order.lora] if order.lora else None,
            cache_salt=order.cache_salt or None,
            block_hasher=self._block_hasher(),
        )
        salt = self._key_salt(bool(order.lora))
        return [block_key(one, salt) for one in request.block_hashes]

    def _block_hasher(self) -> Any:
        """As `EngineCore.__init__` makes its own (vllm/v1/engine/core.py, 0.32)."""
        if self._hasher is None:
            _, size = kv_cache_utils.resolve_kv_cache_block_sizes(self._kv_cache_config, self._config)
            algorithm = get_hash_fn_by_name(self._config.cache_config.prefix_caching_hash_algo)
            self._hasher = kv_cache_utils.get_request_block_hasher(size, algorithm)
        return self._hasher
