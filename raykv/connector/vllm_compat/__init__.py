"""What RayKV needs of vLLM beyond its public connector API, with the version it was read from (0.32.0).

Everything here is a fact about code that may change without notice: each function says which one. RayKV
supports vLLM 0.32 and 0.33; `check_version` warns about others.
"""

from raykv.connector.vllm_compat.connectors import (
    EMPTY_HOOKS,
    LOADS_AT_FIRST_ALLOCATION,
    PD_CONNECTORS,
    connector_class,
    copy_kv_blocks,
    idle_rule,
    loads_any_range,
    own_hooks,
    pulled_by_peers,
    remove_half_saved,
    said_by_default,
    saved_tokens,
    settles_in_hook,
    silent_refusal,
)
from raykv.connector.vllm_compat.engine import (
    attention_backends,
    check_version,
    child_vllm_config,
    device_type,
    global_rank,
    has_mamba,
    mla_layers,
    no_sleep_mode,
    parallel_ranks,
    portable_vllm_config,
    share_vllms_log,
    why_no_loads,
    windowed_groups,
)
from raykv.connector.vllm_compat.engine_wake import find_waker
from raykv.connector.vllm_compat.steps import as_if_computed, filtered_output, is_status, pool_blocks, prompt_tokens

__all__ = [
    "EMPTY_HOOKS",
    "LOADS_AT_FIRST_ALLOCATION",
    "PD_CONNECTORS",
    "as_if_computed",
    "attention_backends",
    "check_version",
    "child_vllm_config",
    "connector_class",
    "copy_kv_blocks",
    "device_type",
    "filtered_output",
    "find_waker",
    "global_rank",
    "has_mamba",
    "idle_rule",
    "is_status",
    "loads_any_range",
    "mla_layers",
    "no_sleep_mode",
    "own_hooks",
    "parallel_ranks",
    "pool_blocks",
    "portable_vllm_config",
    "prompt_tokens",
    "pulled_by_peers",
    "remove_half_saved",
    "said_by_default",
    "saved_tokens",
    "settles_in_hook",
    "share_vllms_log",
    "silent_refusal",
    "why_no_loads",
    "windowed_groups",
]
