"""The ids: slots, request rows, KV pages, the prefix cache, and the sums that size them. No torch."""
