"""EXAONE 3 and 3.5: Llama, whose published files have names of their own for fields and tensors."""
