"""What the tests, the demo and the benchmark start: engines, servers, models.

Importing any of it imports neither vllm, torch nor ray: `engine_process` and `engine_stats` run in an engine.
"""
