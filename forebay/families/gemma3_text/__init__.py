"""Gemma 3's language model: norms around both halves, sliding windows with a rotary base of their own."""
