"""MiniMax M2: q and k normed over all their heads together, part of each head rotated, experts in all layers."""
