"""The kinds of cache beside full KV, one file each: all that is particular to a kind stands in its room."""
