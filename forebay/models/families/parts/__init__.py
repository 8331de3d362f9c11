"""Descriptions of layers that several families share."""
