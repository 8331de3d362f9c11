"""OLMoE: q and k normed over all their heads together, norms before both halves, experts in all layers."""
