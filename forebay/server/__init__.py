"""HTTP: OpenAI's routes and ours, in front of an engine that lives in another process."""
