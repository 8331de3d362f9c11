"""Descriptions of the text encoders: a module each, named by their `model_type`, with a `describe`."""
