"""Arcee: Llama whose MLP has the square of a ReLU and no gate."""
