"""DeepSeek-V4: a short window in each layer, and compressed entries of all tokens before it."""
