"""Keys from files: those of clients, and the one that servers prove to each other."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from forebay.base.errors import ConfigError
from forebay.base.log import event, get_logger
from forebay.base.units import human_bytes
from forebay.config.flag import Settled
from forebay.config.server_args import BY_NAME

MAX_KEY_FILE_BYTES: Final = 1 << 16
MIN_KEY_CHARS: Final = 8
MIN_CLUSTER_KEY_BYTES: Final = 16

log = get_logger("config")


def api_keys(written: Settled, name: str) -> tuple[str, ...]:
    """Those that a setting names, by itself or as the lines of a file; none where nobody wrote either."""
    path = written.get(f"{name}_file")
    if name in written:
        keys, where = [str(written[name])], BY_NAME[name].option
    elif path is not None:
        option = BY_NAME[f"{name}_file"].option
        keys, where = _read_keys(Path(str(path)), option), f"{option} {path}"
    else:
        return ()
    if any(len(key) < MIN_KEY_CHARS or not key.isascii() or not key.isprintable() for key in keys):
        raise ConfigError(f"{where}: a key is at least {MIN_KEY_CHARS} printable ASCII characters long")
    return tuple(keys)


def _read_keys(path: Path, option: str) -> list[str]:
    text = read_text(path, option, MAX_KEY_FILE_BYTES)
    keys = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"{option} {path}: there is no key in it")
    if path.stat().st_mode & 0o007:
        log.warning(event("key_file_open", path=path, problem="others can read it", fix=f"chmod 600 {path}"))
    return keys


def read_text(path: Path, option: str, limit: int) -> str:
    """A file of at most `limit` bytes that `option` names. Raises ConfigError."""
    try:
        if path.stat().st_size > limit:
            raise ConfigError(f"{option} {path}: larger than {human_bytes(limit)}")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option} {path}: cannot be read ({error})") from None


def cluster_key(settled: Settled) -> bytes:
    """Empty where there is no file. Everything in it but white space around it is the key."""
    if "cluster_key_file" not in settled:
        return b""
    path = str(settled["cluster_key_file"])
    key = read_text(Path(path), "--cluster-key-file", MAX_KEY_FILE_BYTES).strip().encode()
    if len(key) < MIN_CLUSTER_KEY_BYTES:
        least = f"put at least {MIN_CLUSTER_KEY_BYTES} random ones in it"
        raise ConfigError(f"--cluster-key-file {path}: {len(key)} bytes are no key: {least}")
    return key
