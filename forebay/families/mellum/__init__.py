"""Mellum 2: Qwen3's mixture with windows in the layers that are named, and a rope for each kind of attention."""
