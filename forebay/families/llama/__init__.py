"""Llama, and what follows it: Llama 2 and 3, SmolLM 1 and 2, and many more."""
