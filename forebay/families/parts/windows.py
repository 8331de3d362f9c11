"""Windows in all layers but every few, as EXAONE 4 has them."""

from __future__ import annotations

from typing import Any

from forebay.families.base.fields import Fields
from forebay.families.base.shape import WINDOW, Shape
from forebay.families.config.transformer import FULL, SLIDING, Defaults, TransformerValues, Windows, transformer


def windowed_transformer(fields: Fields) -> TransformerValues:
    """Read a transformer without biases, where each layer but every `sliding_window_pattern`-th has a window. A pattern
    has no effect beside a list of layers or a null as `sliding_window`, and may then be letters, as published."""

    def windowed(num_layers: int) -> list[int]:
        pattern = fields.size("sliding_window_pattern", default=4)
        return [i for i in range(num_layers) if (i + 1) % pattern]

    if fields.get("layer_types") is not None or fields.is_null("sliding_window"):
        fields = fields.dropped("sliding_window_pattern")
    defaults = Defaults(rms_norm_eps=1e-5, attention_bias=False)
    return transformer(fields, defaults, windows=Windows(layers=windowed))


def small(shape: Shape) -> dict[str, Any]:
    """Return the own fields of a small model: three layers with a window, then one without."""
    return {"layer_types": shape.cycle(SLIDING, SLIDING, SLIDING, FULL), "sliding_window": WINDOW}
