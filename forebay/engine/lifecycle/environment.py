"""Everything that the tokens of a request depend on in an engine, beside the request itself."""

from __future__ import annotations

from pathlib import Path

from forebay.base.package import __version__
from forebay.config.engine_config import EngineConfig
from forebay.formats.identity import weights_digest
from forebay.ops import Ops


def environment_of(config: EngineConfig, ops: Ops, kernels: str) -> dict[str, str]:
    """Return the digests and names of what computes, by what they are of (C31). `kernels`: see `make_transfers`."""
    draft = config.speculation.draft_model_path
    return {
        "version": __version__,
        "weights": weights_digest(Path(config.model_path)),
        "draft weights": weights_digest(Path(draft)) if draft else "",
        "kernels": kernels,
        "device": config.device,
        **config.types.dtypes,
        "activation dtype": str(config.activation_dtype),
        "quantization": str(config.quantization),
        "activation bits": str(ops.activation_bits),
        "exact": str(config.exact),
        "speculation": str(config.speculation.algorithm),
    }
