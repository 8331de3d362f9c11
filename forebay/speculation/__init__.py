"""Who guesses what comes next, and how much guessing pays. Nothing here can change a token."""
