"""The front door: an OpenAI-compatible router for prefill and decode engines, on Ray Serve."""
