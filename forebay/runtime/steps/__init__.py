"""The shapes of steps, with their inputs, the model over the pools, and the results for the host."""
