"""A P/D consumer of the tests' own: like NIXL it takes a prompt whose request says that another engine has it.

There is no other engine. A transfer writes garbage, so that a token tells of it, and leaves `pulled` in the control
folder; a request that needs none leaves `released`, where NIXL would tell the other side to free its blocks.
"""

from __future__ import annotations

from typing import Any

from tests.support.file_child import FileChild, FileChildMetadata

GARBAGE = -1000.0


class PullChild(FileChild):
    """Saves nothing; loads all of a prompt but its last token when `do_remote_prefill` is set."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if not (request.kv_transfer_params or {}).get("do_remote_prefill"):
            return 0, False
        tokens = max(0, request.num_prompt_tokens - 1 - num_computed_tokens)
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_prefill"):
            return
        params["do_remote_prefill"] = False  # in place, as NIXL does
        if num_external_tokens > 0:
            self._loads[request.request_id] = [("", block) for block in blocks.get_block_ids()[0]]
        else:
            (self._control / "released").touch()

    def _plan_save(self, meta: FileChildMetadata, req_id: str, computed: int, output: Any) -> None:
        pass

    def _load(self, request_id: str, blocks: list[tuple[str, int]]) -> None:
        (self._control / "pulled").touch()
        for cache in self._caches.values():
            cache[[block for _, block in blocks]] = GARBAGE
        self._arrived.add(request_id)
