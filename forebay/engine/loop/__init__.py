"""The engine's side: from a configuration to a loop that takes frames, plans steps and sends updates."""
