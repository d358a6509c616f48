"""What RayKV looks like in use."""
