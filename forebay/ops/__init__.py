"""Every kernel a layer calls, behind one table that is made once and handed to the layers.

    ops = make_ops("native", num_threads=2)      # of forebay.backends; "torch" is the reference
    w = ops.linear.pack(weight, bias)            # weight [N, K] may be dropped afterwards
    qkv = ops.linear.apply(x, w)                 # [T, K] -> [T, N]; logits: ops.linear.apply_f32(x, w)
    q = qkv[:, : Hq * D].view(T, Hq, D)          # a view: no copy is needed
    ops.attention.apply_rope(q, k, positions, cos_sin)  # in place
    ops.attention.store_kv(k, v, cache, paged.out_cache_loc)
    o = ops.attention.paged_attention(q, cache, paged, scale=scale)

There is no global switch: each user of kernels gets an `Ops`. `Ops` (interface.py) has groups of ops by concern: those
in reference/ state each op's contract and compute it in torch. `NativeOps` (native/) has the C++ twins in cpu/,
compiled for this machine on first use (`python -m forebay.ops.build` does it ahead). Both take bfloat16 or float32
tensors on the CPU. `TritonOps` (triton/) takes those on an NVIDIA GPU; a row's equal bits are proved there in Triton's
interpreter alone. q, k, v and the x of linear layers, the norms, the activations and the recurrences may be views into
wider rows, and so may gates; all else is contiguous. Shapes, dtypes and index ranges are the caller's contract: the
native ops check none of them per call.

A row's result of a native op is the same, bit by bit, whatever the other rows of the call are. It does not depend on
how a prompt is cut into chunks, on the page size, or on the number of threads.
"""

from __future__ import annotations

from forebay.ops.interface import Ops
from forebay.ops.linear import LinearWeight
from forebay.ops.reference.experts import ExpertActivation, Gating, Scoring
from forebay.ops.reference.sampling import Draws

__all__ = ["Draws", "ExpertActivation", "Gating", "LinearWeight", "Ops", "Scoring"]
