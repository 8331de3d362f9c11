"""From flags, environment and file to one resolved, frozen configuration."""
