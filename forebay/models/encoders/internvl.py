"""InternViT, with a connector behind it: a row of the tile beside its patches, which attend to each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from forebay.families.model_config import ModelConfig
from forebay.families.vision.internvl import InternVitConfig
from forebay.layers.build import Parts
from forebay.layers.encoder import MOST_SIZES, ProjectorSpec
from forebay.layers.intern_vit import ClassPatchesSpec, ScaledBlockSpec
from forebay.layers.norms import LayerNormSpec, build_norm, layer_norm_spec
from forebay.layers.params import Weights
from forebay.layers.rotary import RopeTables
from forebay.models.encoders.encoder import Encoder, State
from forebay.ops import Ops
from forebay.ops.reference.attention import PagedKv, segments

_TOWER = "model.vision_tower"


@dataclass(frozen=True, kw_only=True, slots=True)
class InternVitSpec:
    """Patches, blocks, and behind the last one `norm`, None for none, and the connector. `tokens` says how many a tile
    has."""

    patches: ClassPatchesSpec
    blocks: tuple[ScaledBlockSpec, ...]
    norm: LayerNormSpec | None
    norm_eps: float
    connector: ProjectorSpec
    tokens: str

    def build(self, ops: Ops, weights: Weights) -> InternVitEncoder:
        """Return the encoder with its weights."""
        return InternVitEncoder(self, ops, weights)

    def equations(self) -> Iterator[str]:
        """Yield what it computes, line by line."""
        block, last = self.blocks[0], len(self.blocks) - 1
        norm = "norm" if block.rms_norm else "layernorm"
        q, k = (f"norm of all heads({w})" if block.head_norm else w for w in ("Wq h", "Wk h"))
        plus = " + b" if block.bias else ""
        yield self.patches.equation
        yield f"\nlayers 0-{last}:" if last else "\nlayer 0:"
        yield f"  x += s attention({norm}(x))"
        yield f"  x += t mlp({norm}(x))"
        yield f"  attention(h) = Wo softmax({block.head_dim**-0.5:.4g} q·k) v + b  over all of a tile"
        yield f"    q = {q}{plus}, k = {k}{plus}, v = Wv h{plus}; {block.num_heads} heads of {block.head_dim}"
        yield f"  mlp(h) = Wd gelu(Wu h + b) + b  of {block.intermediate_size:,}; s and t have a weight for each entry"
        connector = self.connector.equation if self.norm else self.connector.equation.replace("layernorm(x)", "x")
        yield f"\nembedding[image] = {connector}  ({self.tokens})"


class InternVitEncoder(Encoder):
    """The patches of a tile and its own row attend to each other; a tile's bits depend on its pixels alone."""

    def __init__(self, spec: InternVitSpec, ops: Ops, weights: Weights) -> None:
        super().__init__(weights, len(spec.blocks), spec.connector.output_size)
        parts = Parts(ops, weights, RopeTables(1, weights.device, ops.memory))
        self._patches = spec.patches.build(parts)
        self._blocks = [block.build(parts) for block in spec.blocks]
        self._norm = None if spec.norm is None else build_norm(spec.norm, parts, spec.norm_eps).of
        self._connector = spec.connector.build(parts)
        assert not parts.kept, "an encoder keeps nothing"
        self._size, self._device = spec.patches.size, weights.device
        self._tile = lru_cache(MOST_SIZES)(self._tile_of)

    def begin(self, pixels: Tensor) -> State:
        """pixels uint8 [height, width, 3], red first, contiguous -> the state before the first layer."""
        height, width, _ = pixels.shape
        return State(self._patches(pixels), (height // self._size, width // self._size))

    def layers(self, state: State, first: int, last: int) -> State:
        """Run layers `first` up to, not including, `last`."""
        x, tile = state.x, self._tile(len(state.x))
        for block in self._blocks[first:last]:
            x = block(x, tile)
        return State(x, state.grid)

    def _tile_of(self, num_rows: int) -> PagedKv:
        return segments([num_rows], self._device)

    def finish(self, state: State) -> Tensor:
        """Turn the patches behind the last layer into [tokens of the tile, H]; the tile's own row is left out."""
        x = state.x if self._norm is None else self._norm(state.x)
        return self._connector(x[1:], state.grid)


def encoder_spec(config: ModelConfig) -> InternVitSpec:
    """Describe the encoder of an InternVL."""
    vision = config.vision
    assert isinstance(vision, InternVitConfig), f"{config.model_type} has no such encoder"
    return InternVitSpec(
        patches=ClassPatchesSpec(
            name=f"{_TOWER}.embeddings",
            hidden_size=vision.hidden_size,
            size=vision.patch_size,
            side=vision.side,
            rescale=vision.rescale,
            mean=vision.mean,
            std=vision.std,
        ),
        blocks=tuple(_block(vision, layer) for layer in range(vision.num_layers)),
        norm=layer_norm_spec(f"{_TOWER}.layernorm", vision.hidden_size, bias=True) if vision.last_norm else None,
        norm_eps=vision.norm_eps,
        connector=ProjectorSpec(
            name="model.multi_modal_projector",
            factor=vision.merge,
            hidden_size=vision.hidden_size,
            inner_size=config.hidden_size,
            output_size=config.hidden_size,
            norm=True,
            bias=True,
        ),
        tokens=f"{vision.max_tokens:,} tokens a tile",
    )


def _block(vision: InternVitConfig, layer: int) -> ScaledBlockSpec:
    return ScaledBlockSpec(
        name=f"{_TOWER}.encoder.layer.{layer}",
        hidden_size=vision.hidden_size,
        intermediate_size=vision.intermediate_size,
        num_heads=vision.num_heads,
        norm_eps=vision.norm_eps,
        bias=vision.bias,
        head_norm=vision.head_norm,
        rms_norm=vision.rms_norm,
    )
