"""State rings: what is kept of the last tokens of a request, in a slot that is its row."""
