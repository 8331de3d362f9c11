"""Granite 3, dense: Llama, where constants scale embeddings, scores, what each part adds, and logits."""
