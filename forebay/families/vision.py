"""Configurations of the encoders that turn pictures into rows of a model's embedding."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionConfig:
    """The encoder beside a language model, of a `kind` (the name of its folder in `families`).

    Tiles are squares of `image_size` pixels, in patches of `patch_size`. `scale_factor` squared patches become one
    token of the prompt, whose id there is `placeholder`.
    """

    kind: str
    placeholder: int
    image_size: int
    patch_size: int
    scale_factor: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    norm_eps: float

    @property
    def tokens_per_tile(self) -> int:
        return (self.image_size // self.patch_size // self.scale_factor) ** 2
