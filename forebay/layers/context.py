"""What a layer may know about the step it runs in. No ambient state: this is an argument. T is the number of tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from forebay.ops.attention import PagedKv
from forebay.ops.recurrence import StateBatch
from forebay.pools.cache_pool import CachePool


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardContext:
    """The tokens of all sequences, one sequence after the other, as `full` and `states` divide them.

    A sequence's positions are contiguous and end with its length; attention is causal. `full` is for layers that keep
    all tokens; `window`, whose pages behind the window are not there any more, for those with a sliding window, and the
    same as `full` where no layer has one. `states` names the recurrent states. `per_layer` is what each of L layers is
    given of each token beside the residual stream, side by side, in models that have such inputs.
    """

    positions: Tensor  # [T] int64
    full: PagedKv
    window: PagedKv
    states: StateBatch
    cache: CachePool
    per_layer: Tensor | None = None  # [T, L * P]
