"""The file of the vision encoder of a GGUF model: named, or found beside the model."""

from __future__ import annotations

from pathlib import Path

from forebay.base.errors import ConfigError
from forebay.config.flag import AUTO, Auto, Value
from forebay.config.pictures import NO_MMPROJ
from forebay.formats.gguf_parts import SUFFIX
from forebay.formats.mmproj_files import mmproj_beside


def encoder_file(given: Value | Auto, origin: str, model: Path) -> Path | None:
    """Return the file of the encoder of the model at this path: the `given` one, which may be the name of a file beside
    the model, or else the one beside the model.

    Raises ConfigError for a file that does not exist and for a model in a folder. Raises ModelError if several files
    beside the model are equally good."""
    if given == NO_MMPROJ:
        return None
    if given is AUTO:
        return mmproj_beside(model)
    path = Path(str(given)).expanduser()
    if model.suffix != SUFFIX:
        raise ConfigError(
            f"{origin} ({given}): {model} is no GGUF model, and has an encoder in its own files: leave it out"
        )
    beside = model.with_name(path.name)
    if not path.is_file() and path.name == str(given) and beside.is_file():
        return beside
    if not path.is_file():
        raise ConfigError(f"{origin} ({given}): there is no such file")
    return path
