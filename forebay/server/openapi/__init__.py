"""/openapi.json and the page made of it."""
