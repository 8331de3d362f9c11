"""OpenAI's routes: chat, completions, responses, embeddings and scores."""
