"""Connections, bytes and errors: what every application of ours stands on, whatever it answers."""
