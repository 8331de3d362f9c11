"""Hunyuan, dense: Llama with q and k normed by heads after they are rotated; a constant stretches the rope's base."""
