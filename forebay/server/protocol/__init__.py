"""The bodies that clients send: strict, bounded, closed, and refused by the name of the field."""
