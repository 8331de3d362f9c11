"""The transitions of an engine as a whole: its process starts, its memory is divided, it sleeps, its weights change."""
