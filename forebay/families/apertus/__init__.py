"""Apertus: Llama with norms of q and k by heads, and an MLP without a gate whose xIELU each layer has learned."""
