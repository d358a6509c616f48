"""RayKV: a KV-cache tiering service for vLLM that runs on Ray.

Importing this package imports neither ray, torch nor vllm.
"""

__version__ = "0.1.0"
