"""Mistral: Llama without biases, and a sliding window on every layer if the configuration has one."""
