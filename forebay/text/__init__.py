"""Between text and token ids: tokenizers, chat templates, incremental detokenization. No tensors, no network."""
