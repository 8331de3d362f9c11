"""ERNIE 4.5 with experts in all layers but the first ones, beside an MLP that all tokens share in some models."""
