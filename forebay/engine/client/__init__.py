"""The two ways to use an engine from Python: `AsyncEngine`, over its process, and `LLM`, in this one."""
