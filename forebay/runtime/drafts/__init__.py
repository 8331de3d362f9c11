"""Proposers that draft tokens on the device: heads, smaller models, and assistants over the KV of the model."""
