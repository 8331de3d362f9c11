"""Attention, MLP and the other parts that models are made of."""
