"""Names of norms beside Mamba mixers."""

from __future__ import annotations

FINAL_NORM = "model.final_layernorm"
NORMS = ("input_layernorm", "pre_ff_layernorm")
"""Of a layer's mixer and its MLP; Falcon-H1 and Jamba call all of these so, too."""
