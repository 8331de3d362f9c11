"""InternLM 3: Llama under other names of the fields for biases."""
