"""The loop, the processes it lives in, and the two ways to use it from Python: `LLM` and `AsyncEngine`."""
