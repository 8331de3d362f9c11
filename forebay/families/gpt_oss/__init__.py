"""gpt-oss: attention sinks, a sliding window in every other layer, a mixture of experts with biases in all."""
