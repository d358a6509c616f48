"""Tests on real vLLM engines. Engines are shared; each test uses prompts of its own."""
