"""Structured output: grammars as masks over the vocabulary. No torch: tokens, bytes and words of bits."""
