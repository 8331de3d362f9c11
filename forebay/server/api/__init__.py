"""The dialects: bodies, routes and answers of each API, and the way from a body to its answer, which all share."""
