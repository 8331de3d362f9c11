"""The memory of one engine: its pools, the allocations of requests, and deferred releases."""
