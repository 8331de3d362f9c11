"""Ministral 3 and Devstral 2: Mistral with YaRN, and queries that are scaled by their position."""
