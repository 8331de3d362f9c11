"""Routes for operators: the served model and its state, metrics, the cache's tree, sleep and new weights."""
