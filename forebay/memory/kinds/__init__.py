"""The kinds of cache beside full KV, a folder each with all that is particular to it."""
