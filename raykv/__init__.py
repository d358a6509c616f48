"""RayKV: a KV-cache tiering service for vLLM that runs on Ray.

Importing this package imports neither ray, torch nor vllm. `raykv.connect()` is for operators: see `raykv.api`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raykv.api import connect

__version__ = "0.1.0"
__all__ = ["__version__", "connect"]


def __getattr__(name: str) -> Any:
    if name == "connect":
        from raykv.api import connect

        return connect
    raise AttributeError(f"module 'raykv' has no attribute {name!r}")
