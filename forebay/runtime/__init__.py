"""Plan to tokens: step inputs, model runner, sampler."""
