"""Parts that every dialect uses: the prompt, the parameters, the generation and its answer."""
