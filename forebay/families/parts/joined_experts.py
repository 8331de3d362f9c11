"""Names of experts whose inputs are joined in files."""

from __future__ import annotations

from typing import Final

from forebay.families.base.tensor_names import TensorNames
from forebay.formats.turned_experts import DOWN, GATE_UP

# Of experts, which are stacked, and their router.
NAMES: Final = TensorNames(
    renamed=(
        (r"\.block_sparse_moe\.input_linear\.weight$", f".block_sparse_moe.experts.{GATE_UP}"),
        (r"\.block_sparse_moe\.output_linear\.weight$", f".block_sparse_moe.experts.{DOWN}"),
        (r"\.router\.layer\.weight$", ".router.weight"),
    ),
    stacked_experts=True,
    stacks=("input_linear.weight", "output_linear.weight"),
)
