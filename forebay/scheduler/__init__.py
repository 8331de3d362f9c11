"""plan and commit: a state machine without clock, sockets, tensors or processes."""
