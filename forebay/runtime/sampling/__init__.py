"""Choice of tokens by logits and parameters, and the log-probabilities and vectors that requests get."""
