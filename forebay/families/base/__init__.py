"""Values and readers on which all families stand: fields of a config.json, shapes, rotary embeddings, mixers, names of
tensors."""
