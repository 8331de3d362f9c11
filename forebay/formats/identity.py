"""Identity of a checkpoint: a digest that two copies of it share, wherever they are."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

from forebay.formats.gguf_parts import model_file, part_paths

# The last two are parts behind the layers.
_NAMES: Final = ("config.json", "*.safetensors", "*/*.safetensors", "*_linear.pt")
_HEAD_BYTES: Final = 64 << 10
_SAMPLES: Final = 64
_SAMPLE_BYTES: Final = 4 << 10


def weights_digest(path: Path) -> str:
    """Return the digest of a checkpoint: its configuration, and of each weight file the size, the header and samples.
    Two trainings of one architecture have the same header, and reading all would take as long as loading."""
    digest = hashlib.blake2b(digest_size=16)
    path = model_file(path)
    files = part_paths(path) if path.is_file() else sorted(each for name in _NAMES for each in path.glob(name))
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name if path.is_dir() else ''} {size}\n".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(_HEAD_BYTES))
            for i in range(_SAMPLES):
                stream.seek(max(0, size - _SAMPLE_BYTES) * i // (_SAMPLES - 1))  # the last one ends with the file
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()
