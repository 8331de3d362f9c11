"""Several processes that compute one model: each rank executes one ordered log, which rank 0 alone writes."""
