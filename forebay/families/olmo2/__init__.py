"""OLMo 2: norms after attention and MLP instead of before, and q and k normed over all their heads together."""
