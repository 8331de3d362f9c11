"""Connections, bytes, keys, errors and the declaration of a route: shared by the server and the router."""
