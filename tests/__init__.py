"""RayKV's tests."""
