"""The forebay command."""
