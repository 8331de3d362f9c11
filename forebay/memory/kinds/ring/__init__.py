"""State rings: the last tokens of a request, in a slot that is its row."""
