"""The compiled kernels as ctypes functions: their parameters, and one of each for every dtype."""

from __future__ import annotations

import ctypes
import weakref
from ctypes import c_float, c_int, c_long, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forebay.base.topology import Topology, this_topology

_P, _L, _F = c_void_p, c_long, c_float
_BATCH = [*([_P] * 7), _L]
_LINEAR = [_P, _P, _L, _P, _P, _P, _L, _L, _L]
_ADAPTERS = [_P, _P, _P, _L, *([_P] * 5), *([_L] * 7)]
_ROWS = [_P, _P, _L, _P, _L, _L]
_ZIP = [_P, _P, _L, _P, _L, _P, _L, _L, _L]
_DELTA = [_P, _P, _L, _P, _L, _P, _L, _P, _L, _L, _P, _L, _P, *_BATCH, _P, _L, _L, _L, _L, _F]
_SCAN = [_P, _P, _L, _P, _L, _P, _P, _L, _P, _L, _P, _P, _P, *_BATCH, _P]
# As the `extern "C"` functions of `cpu/` have them: tests/ops/test_signatures.py compares.
SIGNATURES: dict[str, list[Any]] = {
    "fb_cpu_init": [],
    "fb_pool_create": [c_int, _P, _P, c_int],
    "fb_pool_barriers": [_P],
    "fb_pool_shares": [_P, _L, _P],
    "fb_touch": [_P, _P, _L],
    "fb_pool_destroy": [_P],
    "fb_fill": [_P, _P, _L, _L, c_uint64],
    "fb_copy_rows": [_P, _P, _L, _P, _L, _L, _L],
    "fb_gather": [_P, _P, _P, _P, _L],
    "fb_scatter": [_P, _P, _P, _P, _L],
    "fb_of_tokens": [_P, _P, _P, _P, _P, _L],
    "fb_rope_positions": [*([_P] * 7), _L, _L],
    "fb_place_tokens": [_P, _P, _P, _P, _P, _L, _L, _P, _P, _P, _L],
    "fb_map_locations": [_P, _P, _P, _L, _P, _L],
    "fb_due": [_P, _P, _P, _P, _P, _P, _L],
    "fb_accepted_stops": [*([_P] * 10), _L],
    "fb_advance": [_P, _P, _P, _P, _L],
    "fb_decode_ids": [_P, _P, _P, _P, _P, _L, _L, _P, _L],
    "fb_accept": [_P, _P, _P, _P, _P, _P, _P, _L, _P, _P, _P, _L],
    "fb_gather_rows": [_P, _P, _P, _P, _L, _L],
    "fb_scatter_rows": [_P, _P, _P, _P, _L, _L],
    "fb_mean_rows_{}": [_P, _P, _P, _L, _L, _L],
    "fb_patch_rows_{}": [*([_P] * 5), *([_L] * 4)],
    "fb_replace_rows": [_P, _P, _P, _L, _P, _L, _L],
    "fb_add_rows_{}": [_P, _P, _P, _L, _P, _L, _L],
    "fb_clear_rows": [_P, _P, _P, _P, _L, _L],
    "fb_follow": [_P, _P, _P, _P, _P, _P, _P, _L, _P, _P, _L, _L],
    "fb_keep_drafts": [_P, _P, _P, _P, _L, _P, _L, _P, _L],
    "fb_exchange_bytes": [_L, _L, _L],
    "fb_exchange_create": [_P, _L, _L, _L, _L, _P, _L],
    "fb_exchange_destroy": [_P],
    "fb_exchange_lost": [_P],
    "fb_exchange_end": [_P],
    "fb_exchange_gather": [_P, _P, _P, _L, _L, _L, _P, _L, _L, _L],
    "fb_exchange_rows": [_P, _P, _P, _P, _L, _P, _L, _L],
    "fb_exchange_places": [_P, _P, _P, _L, _L],
    "fb_exchange_spread": [_P, _P, _P, _L, _L],
    "fb_recording_create": [],
    "fb_recording_destroy": [_P],
    "fb_recording_length": [_P],
    "fb_recording_record": [_P],
    "fb_recording_replay": [_P],
    "fb_pack_{}": [_P, _P, _P, _L, _L],
    "fb_linear_{}": _LINEAR,
    "fb_linear_bf16_f32": _LINEAR,
    "fb_pack_f32_of_bf16": [_P, _P, _P, _L, _L],
    "fb_linear_f32_of_bf16": _LINEAR,
    "fb_code_format": [_L, _L, _L, _L, _L],
    "fb_pack_q": [*([_P] * 8), _L, _L],
    "fb_quantize_{}": [*([_P] * 5), _L, _L],
    "fb_linear_q_{}": _LINEAR,
    "fb_linear_q_bf16_f32": _LINEAR,
    "fb_embedding_q_{}": [_P, _P, _P, _P, _L, _L],
    "fb_rms_norm_{}": [_P, _P, _L, _L, _L, _P, _P, _L, _L, _F],
    "fb_add_rms_norm_{}": [_P, _P, _P, _P, _P, _L, _L, _F],
    "fb_layer_norm_{}": [_P, _P, _L, _L, _L, _P, _P, _L, _P, _L, _L, _F],
    "fb_match_rms_{}": [_P, _P, _L, _P, _L, _P, _L, _L, _F],
    "fb_finite_rows_{}": [_P, _P, _P, _L, _L],
    "fb_gated_rms_norm_{}": [_P, _P, _L, _P, _L, _P, _P, _L, _L, _L, _L, _F, _L, _L],
    "fb_silu_and_mul_{}": _ROWS,
    "fb_gelu_and_mul_{}": [*_ROWS, _L],
    "fb_sparse_gelu_and_mul_{}": [*_ROWS, _F],
    "fb_clamped_swiglu_{}": [*_ROWS, _F, _F, _F],
    "fb_relu2_{}": _ROWS,
    "fb_xielu_{}": [*_ROWS, _F, _F, _F, _F],
    "fb_gelu_{}": [*_ROWS, _L],
    "fb_mul_{}": _ZIP,
    "fb_add_{}": _ZIP,
    "fb_mul_silu_{}": _ZIP,
    "fb_mul_sigmoid_{}": [*_ZIP, _L],
    "fb_scale_{}": [_P, _P, _L, _L, _F],
    "fb_scale_rows_{}": [_P, _P, _L, _P, _P, _L, _L],
    "fb_narrow": [_P, _P, _P, _L, _L],
    "fb_softcap": [_P, _P, _L, _L, _F],
    "fb_copy_blocks": [_P, _P, _P, *([_L] * 7)],
    "fb_delta_gates_{}": [_P, _P, _L, _P, _L, _P, _P, _P, _F, _P, _P, _L, _L, _L],
    "fb_apply_rope_{}": [_P, _P, _L, _L, _P, _L, _L, _L, _P, _L, _P, _L, _P, _L],
    "fb_attention_plan_create": [],
    "fb_attention_plan_destroy": [_P],
    "fb_attention_plan_make": [_P, _P, _P, _L, _P, _P, _P, _P, *([_L] * 9), _P],
    "fb_paged_attention_{}_{}": [_P, _P, _P, _L, _P, _L, _L, _P, _P, _L, _L, _P, _F, _F, _P, _P],
    "fb_select_tokens_{}_{}": [_P, _P, _P, _L, _P, _L, _P, _P, _L, _P, _P, _P, _P, *([_L] * 5), _P, _P],
    "fb_block_tokens": [*([_P] * 6), _L, _L, _L, _P, _P],
    "fb_token_pages": [_P, _P, _P, _P, _P, _P, _L, _P, _P, _P, _L, _L, _L],
    "fb_bind_newest": [_P, _P, _P, _P, _P, _L, _P, _P, _P, _L, _L, _L, _L, _P, _P],
    "fb_swap_in": [
        *[_P, _P, _P, _L, _P, _L, _P, _P, _P, _L, _P, _P, _P, _P, _P, _L, _L, _L, _L],
        *[_P, _L, _P, _L, _P, _L, _P, _L, _P, _P, _P, _P],
    ],
    "fb_topk_gating": [_P, _P, _P, _P, _P, _P, *([_L] * 8), _F, _F, _F],
    "fb_hash_gating": [*([_P] * 6), *([_L] * 5), _F, _F, _F],
    "fb_sparse_mixer": [_P, _P, _P, _P, _L, _L, _F],
    "fb_fused_experts_{}": [_P, _P, _L, _P, _P, _P, _P, _P, *([_L] * 7), _F, _F, _F],
    "fb_experts_inside_{}": [_P, _P, _L, _P, _P, _P, *([_L] * 7), _F, _F, _F],
    "fb_experts_outside_{}": [*([_P] * 6), *([_L] * 5)],
    "fb_linear_heads_{}": [_P, _P, _L, _L, _P, _P, _L, _L, _L, _L],
    "fb_rope_and_store_kv_{}_{}": [
        *[_P, _P, _L, _L, _P, _L, _L, _P, _L, _L, _L, _L, _P, _L, _P, _L, _P],
        *[_P, _L, _P, _P, _L, _P, _P, _L],
    ],
    "fb_mix_weights_{}": [*([_P] * 8), _L, _L, _L, _L, _F, _F],
    "fb_last_weights_{}": [*([_P] * 6), _L, _L, _L, _F, _F],
    "fb_collapse_streams_{}": [_P, _P, _P, _P, _L, _L, _L],
    "fb_mix_streams_{}": [_P, _P, _P, _L, _L, _L],
    "fb_spread_streams_{}": [_P, _P, _P, _P, _L, _L, _L],
    "fb_match_streams_{}": [_P, _P, _P, _P, _L, _L, _L],
    "fb_ngram_rows_{}": [*([_P] * 8), *([_L] * 6)],
    "fb_plan_blocks": [*([_P] * 4), _L, *([_P] * 3), *([_L] * 7), *([_P] * 7)],
    "fb_entry_pages": [_P, _P, _P, _P, _L, _L, _P, _P, _P],
    "fb_selected_lens": [_P, _P, _P, _P, _L],
    "fb_first_positions": [_P, _P, _L, _L, _L, _P, _L, *([_P] * 5), _L, _L, _P],
    "fb_compress_{}": [_P, _P, _L, _P, _L, *([_P] * 9), *([_L] * 6)],
    "fb_unrotate_{}": [_P, _P, _L, _L, _L, _P, _P, _L, _L],
    "fb_compressed_attention_{}_{}": [
        *[_P, _P, _P, _P, _L, _P, _P, _L, _P, _P, _P, _L, _L, _L],
        *[_P, _L, _P, _P, _L, _P, _P, _L, _F, _P, _P, _L, _L, _L],
    ],
    "fb_add_adapters_{}": _ADAPTERS,
    "fb_add_adapters_f32_of_bf16": _ADAPTERS,
    "fb_embedding": [_P, _P, _P, _P, _L, _L],
    "fb_embedding_f32_of_bf16": [_P, _P, _P, _P, _L, _L],
    "fb_argmax_rows": [_P, _P, _P, _P, _L, _L],
    "fb_mask_logits": [_P, _P, _P, _P, _L, _L, _L],
    "fb_sample_rows": [_P, _P, _P, _P, _P, _P, _P, _P, _L, _L],
    "fb_causal_conv_{}": [_P, _P, _L, _P, _P, _P, *_BATCH, _P, _L, _L, _L],
    "fb_mamba1_scan_{}_{}": [*_SCAN, _L, _L],
    "fb_mamba2_scan_{}_{}": [*_SCAN, _L, _L, _L, _L, _F, _F],
    "fb_gated_delta_rule_{}_{}": _DELTA,
}
# Of those that return anything.
RESULTS = {
    "fb_cpu_init": c_int,
    "fb_code_format": _L,
    "fb_quantize_{}": _L,
    "fb_pool_create": _P,
    "fb_pool_barriers": _L,
    "fb_exchange_bytes": _L,
    "fb_exchange_create": _P,
    "fb_exchange_lost": _L,
    "fb_recording_create": _P,
    "fb_recording_length": _L,
    "fb_attention_plan_create": _P,
}
_SUFFIXES = {torch.bfloat16: "bf16", torch.float32: "f32"}


class Kernels:
    """A loaded library and the threads that run it, which end with this object. With several nodes in the `topology`,
    threads are divided among them, and so is each weight.

    Raises OSError if the library cannot be loaded, or if the operating system refuses the CPU's tile registers.
    """

    def __init__(self, path: Path, variant: str, num_threads: int, topology: Topology | None = None) -> None:
        self.path, self.variant = path, variant
        self._lib = ctypes.CDLL(str(path))
        if self.bind("fb_cpu_init")() != 0:
            raise OSError(f"the operating system refuses the registers that the {variant} kernels need")
        topology = this_topology() if topology is None else topology
        self.num_nodes = len(topology.nodes)
        self.pool = self._create_pool(num_threads, topology)
        self._touch = self.bind("fb_touch")

    def _create_pool(self, num_threads: int, topology: Topology) -> int:
        threads, cpus = topology.nodes_of_threads(num_threads), topology.nodes_of_cpus()
        arrays = [(c_int * len(numbers))(*numbers) for numbers in (threads, cpus)]
        return self.create("fb_pool", self, num_threads, *map(ctypes.addressof, arrays), len(cpus))

    def touch(self, memory: Tensor) -> None:
        """Let new memory of a weight be that of the nodes whose threads will read it: the system gives each page to the
        node that touches it first. Nothing with one node."""
        if self.num_nodes > 1:
            self._touch(self.pool, memory.data_ptr(), memory.nbytes)

    @property
    def num_barriers(self) -> int:
        """How often all threads have met at the end of an op."""
        count: int = self.bind("fb_pool_barriers")(self.pool)
        return count

    def shares(self, period: int) -> list[int]:
        """Return the first of `period` parts of a weight that each node reads, and `period` itself at the end."""
        first = (c_long * (self.num_nodes + 1))()
        self.bind("fb_pool_shares")(self.pool, period, ctypes.addressof(first))
        return list(first)

    def create(self, thing: str, owner: object, *args: int) -> int:
        """A new object of the library's, which lives as long as `owner`."""
        created: int = self.bind(f"{thing}_create")(*args)
        weakref.finalize(owner, self.bind(f"{thing}_destroy"), created)
        return created

    def bind(self, name: str, pattern: str | None = None) -> Any:
        """The function `name`, whose parameters are those of `pattern`."""
        function = getattr(self._lib, name)
        function.argtypes = SIGNATURES[pattern or name]
        function.restype = RESULTS.get(pattern or name)
        return function

    def addresses(self, pattern: str) -> dict[torch.dtype, int]:
        """Return the addresses of functions that other kernels call."""
        return {dtype: self.address(pattern.format(suffix)) for dtype, suffix in _SUFFIXES.items()}

    def address(self, name: str) -> int:
        """Return the address of a function that other kernels call."""
        return ctypes.cast(getattr(self._lib, name), c_void_p).value or 0

    def by_dtype(self, pattern: str) -> dict[torch.dtype, Any]:
        """Bind one kernel per dtype: `{}` in `pattern` is replaced with the suffix of each dtype."""
        return {dtype: self.bind(pattern.format(suffix), pattern) for dtype, suffix in _SUFFIXES.items()}

    def by_cache_dtype(self, pattern: str) -> dict[tuple[torch.dtype, torch.dtype], Any]:
        """By the dtype of the input and that of the cache, which is never the larger."""
        return {
            (dtype, cache_dtype): self.bind(pattern.format(suffix, cache_suffix), pattern)
            for dtype, suffix in _SUFFIXES.items()
            for cache_dtype, cache_suffix in (*_SUFFIXES.items(), (torch.int8, "i8"))
            if cache_dtype.itemsize <= dtype.itemsize
        }

    def by_dtypes(self, pattern: str) -> dict[tuple[torch.dtype, torch.dtype], Any]:
        """By the dtype of the input and that of the state."""
        return {
            (dtype, state_dtype): self.bind(pattern.format(suffix, state_suffix), pattern)
            for dtype, suffix in _SUFFIXES.items()
            for state_dtype, state_suffix in _SUFFIXES.items()
        }


def address(tensor: Tensor | None) -> int | None:
    """Return the address of the tensor's first element, or None for None, as ctypes passes a null pointer."""
    return None if tensor is None else tensor.data_ptr()


def view(x: Tensor) -> tuple[int, int]:
    """Return the address of its rows, and their distance."""
    return x.data_ptr(), x.stride(0)
