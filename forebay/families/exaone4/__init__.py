"""EXAONE 4: norms behind attention and MLP, q and k normed by heads; with windows, full attention is not rotated."""
