"""Ling 3: Kimi delta attention, last in every group of layers latent attention with a gate for each head; experts."""
