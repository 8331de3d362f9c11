"""GLM 4: norms around both halves, half of each head rotated, in neighbouring pairs; biases on q, k and v."""
