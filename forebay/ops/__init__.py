"""Each operation: a torch reference and faster twins with the same name and signature."""
