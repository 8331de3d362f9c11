"""Comparison of the answers of a running server: any server of the OpenAI API, over HTTP, without torch."""
