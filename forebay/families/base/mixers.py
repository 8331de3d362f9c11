"""Values of a configuration about its mixers: families read these values, and layers are built with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Xielu(NamedTuple):
    """The numbers of an xIELU as checkpoints have them; the two alphas before their softplus."""

    alpha_p: float
    alpha_n: float
    beta: float
    eps: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Latent:
    """Latent attention in the letters of `layers/latent_attention.py`: C, N, R and Dv, and of q's latent vector the
    size, 0 where queries come straight from the input. `interleaved`: the checkpoint has rotary pairs as neighbours."""

    rank: int
    q_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    interleaved: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Index:
    """An indexer of sparse attention: heads, their size, and how many tokens it selects for each query. `interleaved`
    as in `Latent`."""

    num_heads: int
    head_dim: int
    top_k: int
    interleaved: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class PooledIndex(Index):
    """An indexer of pools of `pool` tokens, of which it selects those with `top_k` tokens. No rotary pairs are
    neighbours."""

    pool: int


@dataclass(frozen=True, kw_only=True, slots=True)
class HyperConnections:
    """Residual streams between layers: how many, the iterations of Sinkhorn's projection, and its epsilon."""

    num_streams: int
    iterations: int
    eps: float


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedStreams:
    """Residual streams between layers that gates read and write: how many, and the rank of the gates that read."""

    number: int
    rank: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Ngrams:
    """Embeddings of n-grams of 2 to `longest` tokens, of `size` entries together, by `heads` heads for each length.
    `sizes` are the rows of the heads of each of the `layers` that have such embeddings, in `num_parts` parts of
    `num_rows` together for each layer, and `multipliers` the hash's factors. `end` is the token that ends a text.
    `width` and `longest` are the taps of a convolution and their distance in tokens."""

    layers: tuple[int, ...]
    longest: int
    heads: int
    size: int
    width: int
    end: int
    num_parts: int
    sizes: tuple[tuple[int, ...], ...]
    num_rows: tuple[int, ...]
    multipliers: tuple[tuple[int, ...], ...]

    @property
    def past(self) -> int:
        """Return how many tokens before a token its n-grams have."""
        return self.longest - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Mamba1Mixer:
    """`width` inputs, the token's own included, reach a token through the convolution, here and below. `dt_rank`: of
    the low-rank layer that gives dt. `bias`: of the first and the last linear layer."""

    intermediate_size: int
    state_size: int
    dt_rank: int
    width: int
    bias: bool
    conv_bias: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Mamba2Mixer:
    """`bias` and `out_bias`: of the layers before and behind the scan; `dt_limit`: the least and the greatest dt."""

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    width: int
    bias: bool
    conv_bias: bool
    out_bias: bool
    dt_limit: tuple[float, float]

    @property
    def intermediate_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def group_channels(self) -> int:
        """Entries of b, and of c."""
        return self.num_groups * self.state_size

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return self.intermediate_size + 2 * self.group_channels


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaNet:
    """The sizes of a gated delta rule; `width` is that of the convolution before it, in tokens."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    width: int

    @property
    def key_size(self) -> int:
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        return self.num_value_heads * self.value_head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution, over q, k and v."""
        return 2 * self.key_size + self.value_size


@dataclass(frozen=True, kw_only=True, slots=True)
class KimiDelta:
    """`lower_bound`: decays' logarithms are kept between it and 0 by a sigmoid, or, if it is 0, below 0 by a
    softplus."""

    num_heads: int
    head_dim: int
    width: int
    lower_bound: float

    @property
    def size(self) -> int:
        """Size of q, k or v of all heads."""
        return self.num_heads * self.head_dim
