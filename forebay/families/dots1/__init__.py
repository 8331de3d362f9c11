"""dots.llm1: q and k normed head by head, experts in groups beside a shared one behind the first layers."""
