"""What an output must look like, as masks over the vocabulary. No torch: tokens, bytes and words of bits."""
