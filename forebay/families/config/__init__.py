"""The way from a config.json to a `ModelConfig`: the outer file of a model that sees, the transformer, the encoder of
pictures."""
