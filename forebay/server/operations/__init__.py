"""What operators ask: what is served and in which state, metrics, the cache's tree, sleep and new weights."""
