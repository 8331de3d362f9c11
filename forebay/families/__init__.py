"""What models are: their shape from a configuration, their tensors under one set of names, whatever the files."""
