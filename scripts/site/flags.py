"""Every setting, by its group."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Final

from forebay.config.config import Setting
from forebay.config.flag import AUTO, BYTES, SECONDS, Flag
from forebay.config.machine import Amount
from forebay.config.resolve import Survey, resolve
from forebay.config.server_args import FLAGS
from forebay.engine.lifecycle.model_shape import read_shape
from scripts.site.tables import code, codes, table

# That of Llama-3.2-1B: what `auto` becomes depends on the model and the machine, so one of each is the example.
_EXAMPLE: Final = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 128001,
    "hidden_act": "silu",
}
_LARGE: Final = 1 << 26  # bounds above it are only there so that there are some


def page() -> str:
    examples = _settled()
    parts = []
    for group, flags in groupby(FLAGS, key=lambda flag: flag.group):
        rows = [(_name(flag), _about(flag), _default(flag, examples)) for flag in flags]
        title = (group[0].upper() + group[1:]).replace("http", "HTTP").replace("Http", "HTTP")
        parts.append(f"## {title}\n\n" + table(("setting", "what it is", "default"), rows))
    return "\n\n".join(parts)


def _settled() -> Mapping[str, Setting]:
    """What each comes to for the example, on a machine of 16 GiB."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        Path(folder, "config.json").write_text(json.dumps(_EXAMPLE))
        survey = Survey(
            model=lambda *which: read_shape(*which)[::2],
            memory=lambda: Amount(16 << 30, "of this machine"),
            gpu=lambda: None,
        )
        config = resolve({"model": folder}, survey=survey, warn=lambda text: None)
    return {setting.name: setting for setting in config.settings}


def _name(flag: Flag) -> str:
    value = "" if flag.choices else f" {flag.kind.metavar}".rstrip()
    return code(flag.option + value)


def _about(flag: Flag) -> str:
    parts = [f"{flag.help}."]
    if flag.choices:
        parts.append(f"One of {codes(flag.choices)}.")
    if flag.high is not None and flag.high <= _LARGE:
        parts.append(f"{_value(flag, flag.low)} to {_value(flag, flag.high)}.")
    elif flag.low:
        parts.append(f"At least {_value(flag, flag.low)}.")
    if flag.aliases:
        parts.append(f"Also {codes(flag.aliases)}.")
    return " ".join(parts)


def _default(flag: Flag, examples: Mapping[str, Setting]) -> str:
    if flag.default is not AUTO:
        return "no" if flag.default is False else code(_value(flag, flag.default)) if flag.default != () else "none"
    found = examples.get(flag.name)
    if found is None or flag.name in ("model_path", "served_model_name"):
        return "auto"
    return found.reason if found.value in ("none", "-") else f"auto: {code(str(found.value))}, {found.reason}"


def _value(flag: Flag, value: object) -> str:
    if flag.kind is BYTES and isinstance(value, int | float):
        size, unit = int(value), 0
        while size >= 1024 and size % 1024 == 0:
            size, unit = size // 1024, unit + 1
        return f"{size}{('', 'KiB', 'MiB', 'GiB')[unit]}"
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return f"{text} s" if flag.kind is SECONDS else text
