"""The text encoders: a module each, named by their `model_type`, with a `FAMILY` as the families of decoders have it.

The module of the same name in `forebay.models.text_encoders` describes the model of a configuration.
"""
