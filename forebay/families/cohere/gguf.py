from __future__ import annotations

from typing import Final

from forebay.families.base.architecture import Architecture, Header
from forebay.families.parts.gguf.parallel import COHERE_KEYS, COHERE_NAMES


def _configure(header: Header) -> None:
    """Complete the configuration from the tensors: whether heads are normed."""
    header.config["use_qk_norm"] = header.has("attn_q_norm.weight")


ARCHITECTURES: Final = {
    "command-r": Architecture(block_names=COHERE_NAMES, keys=COHERE_KEYS, configure=_configure),
}
