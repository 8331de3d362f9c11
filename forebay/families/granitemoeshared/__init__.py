"""Granite's mixtures with an MLP beside the experts that all tokens share."""
