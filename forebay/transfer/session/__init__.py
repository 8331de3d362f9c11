"""Sessions between two engines: connections, heartbeats, comparison of layouts, and peers."""
