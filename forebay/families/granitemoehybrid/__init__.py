"""Granite 4 hybrids: a Mamba-2 mixer or attention, an MLP that all tokens share, experts beside it in some models.

Constants scale the embeddings, the logits, the attention's scores and what each part adds to the residual stream.
"""
