"""InternViT, with a connector behind it: a row of the tile beside its patches, which attend to each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from forebay.families.config.model_config import ModelConfig
from forebay.families.config.vision.internvl import InternVitConfig
from forebay.layers.encoder import ProjectorSpec
from forebay.layers.intern_vit import ClassPatchesSpec, ScaledBlockSpec
from forebay.layers.norms import LayerNormSpec, layer_norm_spec
from forebay.layers.params import Weights
from forebay.models.encoders.tile_encoder import TileEncoder
from forebay.ops import Ops

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

    def build(self, ops: Ops, weights: Weights) -> TileEncoder:
        """Return the encoder with its weights."""
        return TileEncoder(self, ops, weights, num_own_rows=1)

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
