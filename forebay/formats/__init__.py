"""Checkpoints on disk: GGUF and safetensors headers, the model's shape. No torch."""
