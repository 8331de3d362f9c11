"""GLM-4 of 2024: half of each head rotated, in neighbouring pairs, and biases on q, k and v."""
