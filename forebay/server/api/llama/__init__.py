"""llama-server's routes."""
