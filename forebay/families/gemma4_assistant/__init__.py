"""The draft model for Gemma 4: a few layers of queries alone, over the KV that the model keeps."""
