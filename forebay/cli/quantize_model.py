"""`forebay models quantize`: a checkpoint with its matrices in 4 or 8 bits, to be served here or elsewhere."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Final

from forebay.backends import default_backend, make_ops
from forebay.backends.backend import Here
from forebay.base.cpu import this_cpu
from forebay.base.errors import ConfigError, ModelError
from forebay.base.paths import cache_folder
from forebay.base.progress import byte_progress
from forebay.base.units import human_bytes
from forebay.base.variants import PREBUILT
from forebay.cli.arguments import Parser
from forebay.config.machine import usable_cores
from forebay.families.checkpoint import Checkpoint, open_checkpoint
from forebay.formats.quantization import Quantization
from forebay.formats.store import find_model
from forebay.formats.weight_shapes import ValueBytes

_SPARE_BYTES: Final = 64 << 20  # for the tokenizer, and what the file system keeps
_STORED: Final = ValueBytes(own=4, bfloat16=2)  # of values that are not in codes
_EXAMPLE: Final = "forebay models quantize MODEL --to int4 --out FOLDER"


def add_options(parser: Parser) -> None:
    """Declare the options of `models quantize`."""
    parser.option("--to", choices=("int4", "int8"), metavar="FORM", help="int4 or int8, as --quantization of serve")
    parser.option("--out", metavar="FOLDER", help="where to: a folder that is not there yet")


def quantize(name: str | None, own: argparse.Namespace) -> Path:
    """Write the folder, whole or not at all, and return it. ConfigError for a folder that is there or cannot be
    written, ModelError for a model that cannot be quantized."""
    if name is None or own.to is None or own.out is None:
        raise ConfigError(f"say what, to which form and where to: `{_EXAMPLE}`")
    target = Path(own.out).expanduser().absolute()
    if os.path.lexists(target):
        raise ConfigError(f"{target} is there already: remove it, or choose another --out")
    checkpoint = open_checkpoint(find_model(name))
    if checkpoint.gguf_metadata:
        raise ModelError(
            f"{checkpoint.path} is a GGUF file: quantize the checkpoint that it was made of (a folder or org/name), "
            f"or serve it with --quantization {own.to}"
        )
    quantization = Quantization(own.to)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _check_space(target.parent, checkpoint, quantization)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".quantize-") as scratch:
            made = Path(scratch) / target.name
            made.mkdir()
            num_bytes = _write(checkpoint, made, quantization)
            os.rename(made, target)  # in one step: a folder is there whole, or not at all
    except OSError as error:
        raise ConfigError(f"{target} cannot be written ({error})") from error
    print(f"{human_bytes(checkpoint.num_bytes)} of weights in {human_bytes(num_bytes)}", file=sys.stderr)
    return target


def _write(checkpoint: Checkpoint, folder: Path, quantization: Quantization) -> int:
    from forebay.models.quantized_copy import write_quantized  # brings torch, which nothing but this needs here

    here = Here(this_cpu(), has_gpu=False, kernel_folders=(PREBUILT, cache_folder("ops")))
    ops = make_ops(default_backend(here)[0], usable_cores().value)
    with byte_progress("quantize") as progress:
        return write_quantized(checkpoint, folder, quantization, ops.linear.quantize_into, progress)


def _check_space(folder: Path, checkpoint: Checkpoint, quantization: Quantization) -> None:
    weights = checkpoint.weight_shapes().held_bytes(quantization, _STORED)
    need = weights + checkpoint.num_table_bytes + _SPARE_BYTES
    free = shutil.disk_usage(folder).free
    if free < need:
        raise ConfigError(f"{folder} has {human_bytes(free)} free, and the model needs up to {human_bytes(need)}")
