"""RayKV measured against what vLLM does by itself."""
