"""DeepSeek-V2: latent attention as V3, but experts are scored by a softmax, and a group counts what its best does."""
