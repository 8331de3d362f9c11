"""Sources of draft tokens, and the choice of how many pay. Nothing here can change a token."""
