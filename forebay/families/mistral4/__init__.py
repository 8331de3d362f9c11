"""Mistral 4: latent attention, experts scored by a softmax beside a shared one, queries scaled by their position."""
