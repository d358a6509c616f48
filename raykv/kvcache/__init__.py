"""The engine's KV memory: share it with another process, address its blocks, copy them."""
