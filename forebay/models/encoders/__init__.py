"""Encoders of pictures, a module for each kind: its description, which builds it and prints its equations."""
