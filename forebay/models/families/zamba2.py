from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from forebay.families.parts.mamba2 import HYBRID
from forebay.families.zamba2.config import Zamba2Config
from forebay.layers.build import Block, Parts
from forebay.layers.context import ForwardContext
from forebay.layers.mamba2 import GatedNormSpec, Mamba2Spec
from forebay.layers.params import TensorParam, vector
from forebay.layers.shared_transformer import SharedTransformer, SharedTransformerSpec, Use, UseSpec
from forebay.models.decoder import DecoderSpec, decoder_spec, layer_name, rope_spec
from forebay.models.equations import block_lines
from forebay.models.families.parts.mamba2 import mamba2_spec
from forebay.models.families.parts.mamba_names import FINAL_NORM
from forebay.models.terms import term

_MIXER_EPS = 1e-5  # transformers has no field for it


def describe(config: Zamba2Config) -> DecoderSpec:
    """Describe the whole model: all layers are one stack, as shared blocks read the model's first input."""
    return decoder_spec(config, [_stack(config)], norm=FINAL_NORM)


def _stack(config: Zamba2Config) -> StackSpec:
    hybrids = [layer for layer, kind in enumerate(config.layer_types) if kind == HYBRID]
    # Block i is stored with the layer that uses it first.
    shared = tuple(_shared(config, layer) for layer in hybrids[: config.num_shared])
    uses = {layer: _use(config, layer, number, shared) for number, layer in enumerate(hybrids)}
    layers = tuple(_layer(config, layer, uses.get(layer)) for layer in range(config.num_layers))
    return StackSpec(shared=shared, layers=layers, norm_eps=config.rms_norm_eps)


def _shared(config: Zamba2Config, layer: int) -> SharedTransformerSpec:
    return SharedTransformerSpec(
        name=f"{layer_name(layer)}.shared_transformer",
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        mlp_bias=config.mlp_bias,
        norm_eps=config.rms_norm_eps,
        rope=rope_spec(config) if config.has_rope else None,
    )


def _use(config: Zamba2Config, layer: int, number: int, shared: tuple[SharedTransformerSpec, ...]) -> UseSpec:
    return UseSpec(
        shared=shared[number % len(shared)],
        number=number,
        output_name=f"{layer_name(layer)}.linear",
        rank=config.adapter_rank,
        on_attention=config.adapters_on_attention,
    )


def _layer(config: Zamba2Config, layer: int, use: UseSpec | None) -> LayerSpec:
    name = layer_name(layer) if use is None else f"{layer_name(layer)}.mamba_decoder"
    return LayerSpec(
        use=use,
        mixer=replace(mamba2_spec(config, f"{name}.mamba"), norm=GatedNormSpec(eps=_MIXER_EPS)),
        norm=vector(f"{name}.input_layernorm.weight", config.hidden_size),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSpec:
    """`use` of a shared block before the mixer, None for none."""

    use: UseSpec | None
    mixer: Mamba2Spec
    norm: TensorParam


@dataclass(frozen=True, kw_only=True, slots=True)
class StackSpec:
    """All layers as one block, since many of them want what the first one gets."""

    shared: tuple[SharedTransformerSpec, ...]
    layers: tuple[LayerSpec, ...]
    norm_eps: float

    def build(self, parts: Parts) -> Block:
        """Build the layers over shared blocks, each of which is built once."""
        return Stack(self, parts)


@block_lines.register
def _(block: StackSpec) -> list[str]:
    shared, mixer = block.shared, term(block.layers[0].mixer)
    lines = [f"x += {mixer.of('norm(x)')}", *mixer.lines]
    if not shared:
        return lines
    first = shared[0]
    hybrids = [str(number) for number, layer in enumerate(block.layers) if layer.use is not None]
    return [
        *lines,
        f"in layers {', '.join(hybrids)} instead: x += {mixer.of('norm(x + W block(norm([x, x_0])))')}",
        f"block(h) = mlp(norm(attention(h))), {len(shared)} that take turns, each use with adapters of its own",
        f"  {first.num_heads} heads of {first.head_dim}, {first.num_kv_heads} of KV, mlp {first.intermediate_size:,}",
    ]


class Stack:
    """The layers of Zamba2, with the transformer blocks that they share."""

    def __init__(self, spec: StackSpec, parts: Parts) -> None:
        self._ops = parts.ops
        self._eps = spec.norm_eps
        shared = [SharedTransformer(part, parts) for part in spec.shared]
        self._layers = []
        for layer in spec.layers:
            use = None if layer.use is None else Use(layer.use, shared[layer.use.number % len(shared)], parts)
            self._layers.append((use, layer.mixer.build(parts), parts.weights.tensor(layer.norm)))

    def __call__(self, ctx: ForwardContext, x: Tensor, residual: Tensor) -> Tensor:
        """Without a shared block x += mixer(norm(x)); with one x += mixer(norm(x + use(x, first x))).

        residual holds zeros at first: this is a model's only block.
        """
        ops, eps = self._ops, self._eps
        embedded = x
        for use, mixer, norm in self._layers:
            if use is None:
                x = mixer(ctx, ops.norms.add_rms_norm(x, residual, norm, eps))
            else:
                ops.elementwise.add_(residual, x)
                x = mixer(
                    ctx, ops.norms.rms_norm(ops.elementwise.add_(use(ctx, residual, embedded), residual), norm, eps)
                )
        return x
