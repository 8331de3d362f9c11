"""Ways in which images become tiles and their tokens, a module for each, without a decoder of images."""
