"""Images of requests: fetched, decoded in a process of their own, and cut into the tiles that a model encodes."""
