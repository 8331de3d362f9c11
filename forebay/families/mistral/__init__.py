"""Mistral: Llama without biases, and a sliding window on every layer where the configuration has one."""
