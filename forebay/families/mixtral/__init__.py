"""Mixtral: Mistral with experts instead of an MLP in every layer."""
