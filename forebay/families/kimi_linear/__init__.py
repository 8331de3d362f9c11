"""Kimi Linear: Kimi delta attention, and among every few such layers latent attention without positions; experts."""
