"""Proof, on this machine and with this model, that nothing around a request changes its tokens."""
