"""HTTP: the OpenAI routes, streaming, limits, metrics, and the page at /."""
