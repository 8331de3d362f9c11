"""Vision encoders in GGUF files beside a language model, as llama.cpp writes them (`mmproj-F16.gguf`)."""
