"""Seed-OSS: Llama with biases of q, k and v, and one of attention's output where the file asks for it."""
