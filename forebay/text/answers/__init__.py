"""What a model says, told apart: text, thinking and calls of tools."""
