"""Keys of rotary embeddings of a part of each head."""

from __future__ import annotations

from forebay.families.base.architecture import Header


def configure(header: Header) -> None:
    """Complete the configuration: the share of a head's dimensions that is rotated, which is rounded down to their
    number again."""
    if "attention.key_length" in header.own:
        size = header.whole("attention.key_length")
    else:
        size = header.whole("embedding_length") // header.whole("attention.head_count")
    rotated = header.whole("rope.dimension_count")
    if rotated > size:
        raise header.wrong(f"{rotated} rotated dimensions of {size} of a head")
    header.config.update(head_dim=size, partial_rotary_factor=min(1.0, (rotated + 0.5) / size))
