"""Which of vLLM's paths the router takes."""

from __future__ import annotations

from raykv.router.prompts import CHAT, COMPLETIONS

GENERATE = frozenset({COMPLETIONS, CHAT})
PASSED_ON = {
    "GET": frozenset({"/v1/models", "/version"}),
    "POST": frozenset(
        {"/tokenize", "/detokenize", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/v1/embeddings"}
        | {"/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank", "/pooling", "/classify"}
        | {"/v1/audio/transcriptions", "/v1/audio/translations"}
    ),
}
"""What any decode engine can answer for all. Nothing else is passed on: vLLM has paths that change an engine (sleep,
weights, adapters, caches), and they must not be reached, nor change one engine of several."""


def is_known(path: str) -> bool:
    """Whether some method of this path is for the engines."""
    return path in GENERATE or any(path in paths for paths in PASSED_ON.values())
