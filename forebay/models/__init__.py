"""One file per model family, named by its model_type."""
