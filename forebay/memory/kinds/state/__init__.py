"""Recurrent states: one slot per sequence, snapshots in the prefix cache."""
