"""What decides: pure state machines, no Ray, no vLLM, no torch."""
