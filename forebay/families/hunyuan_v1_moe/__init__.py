"""Hunyuan with experts in every layer, beside an MLP that all tokens share."""
