"""OLMo hybrids: gated delta nets behind a norm, and among every few of them attention before one, as in OLMo 2."""
