"""Command R: attention and an MLP side by side behind one LayerNorm, neighbours as rotary pairs, scaled logits."""
