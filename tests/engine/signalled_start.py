"""Start an engine with the weights cache in a folder: `MODEL FOLDER SIGNS SPEED`.

With the speed "slow" it stops at the first rows that it quantizes, until the file "go" is in SIGNS. Files there tell
the test how far it is. At the end it prints how often it quantized, the outcome and its tokens.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from forebay.engine.lifecycle import packed_cache
from forebay.formats.quantization import Quantization
from forebay.ops.native.linear import NativeLinear
from tests.engine.starts import PROMPTS, start, tokens_of


class Sign(logging.Handler):
    """Writes a file when the engine waits for another one."""

    def __init__(self, signs: Path) -> None:
        super().__init__()
        self.signs = signs

    def emit(self, record: logging.LogRecord) -> None:
        if "weights_cache_waits" in record.getMessage():
            (self.signs / "waits").touch()


def main() -> int:
    """Start the engine and print its outcome; return the exit code."""
    model, folder, signs, speed = map(Path, sys.argv[1:])
    logging.getLogger("forebay").addHandler(Sign(signs))
    logging.getLogger("forebay").setLevel(logging.INFO)
    original, computed = NativeLinear.quantize_into, []

    def quantize_into(ops: NativeLinear, values: Any, out: Any, first: Any) -> None:
        computed.append(first)
        (signs / "computes").touch()
        while str(speed) == "slow" and not (signs / "go").exists():
            time.sleep(0.01)
        original(ops, values, out, first)

    with (
        patch.object(packed_cache, "cache_of_weights", lambda: folder),
        patch.object(packed_cache, "LEAST_BYTES", dict.fromkeys(Quantization, 0)),
        patch.object(NativeLinear, "quantize_into", quantize_into),
    ):
        core, outcome = start(model)
        print(json.dumps([len(computed), outcome.split()[0], tokens_of(core, PROMPTS)]))
    return 0
