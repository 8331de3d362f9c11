"""A whole model folder, small and sound, and ways in which one of its files can be something else."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from forebay.families.checkpoint import open_checkpoint
from forebay.families.small import small_config
from forebay.text.tokenizer import Tokenizer
from forebay.text.tokenizer_saving import save_tokenizer
from tests.text.tiny_tokenizer import tiny_metadata

VOCAB_SIZE = 300
SMALL_FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json")
LARGE_FILES = ("tokenizer.json", "model.safetensors.index.json")
JSON_FILES = (*SMALL_FILES, *LARGE_FILES)
FILES = (*JSON_FILES, "chat_template.jinja", "model.safetensors")


def sound_folder(folder: Path) -> Path:
    """With every file that is read of a folder. Its two tensors make no model."""
    folder.mkdir(exist_ok=True)
    save_tokenizer(tiny_metadata(VOCAB_SIZE), folder)
    config = small_config("llama", hidden_size=32, num_layers=1, vocab_size=VOCAB_SIZE)
    config |= {"eos_token_id": [2], "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    save_file({"a": np.zeros((2, 2), np.float32), "b": np.zeros(3, np.float16)}, folder / "model.safetensors")
    index = {"metadata": {"total_size": 22}, "weight_map": {"a": "model.safetensors", "b": "model.safetensors"}}
    special = {"bos_token": {"content": "<|im_start|>", "lstrip": False}, "eos_token": "<|im_end|>"}
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer |= {"chat_template": [{"name": "default", "template": "{{ messages }}"}], "model_max_length": 10**30}
    written = {
        "config.json": config,
        "generation_config.json": {"eos_token_id": [2, 1], "temperature": 0.6},
        "model.safetensors.index.json": index,
        "special_tokens_map.json": special,
        "tokenizer_config.json": tokenizer,
    }
    for name, value in written.items():
        (folder / name).write_text(json.dumps(value))
    return folder


def read_all(folder: Path) -> None:
    """What a start reads of a folder before any weight."""
    open_checkpoint(folder).weight_shapes()
    Tokenizer.from_path(folder).encode("hello world")


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        before = Path.cwd()
        os.chdir(path.parent)  # a socket's path has 108 bytes at most
        try:
            listener.bind(path.name)
        finally:
            os.chdir(before)


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


# What may lie where a file should. None of these is a sound file of any kind.
NOT_FILES: dict[str, Callable[[Path], None]] = {
    "a pipe": _fifo,
    "an endless device": lambda path: path.symlink_to("/dev/zero"),
    "a device that blocks": lambda path: path.symlink_to("/dev/tty"),
    "a folder": Path.mkdir,
    "a socket": _socket,
    "a terabyte": _sparse,
    "nothing": Path.touch,
    "a file of the kernel": lambda path: path.symlink_to("/proc/self/mem"),
}

# What may be in a file of text.
CONTENTS: dict[str, bytes] = {
    "not UTF-8": b'{"a": "\xff\xfe"}',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "a number of 100,000 digits": b'{"a": ' + b"9" * 100_000 + b"}",
    "no number": b'{"eos_token_id": NaN, "vocab_size": Infinity, "added_tokens": -Infinity}',
    "deep": b'{"a": ' + b"[" * 200_000,
    "deep and closed": b'{"a": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "many values": b'{"a": [' + b"[]," * 1_390_000 + b"[]]}",
    "a list": b"[]",
    "a null": b"null",
    "a string": b'"x"',
    "cut": b'{"a": "b',
    "zeros": bytes(1000),
}

WRONG: list[Any] = [
    None,
    True,
    -1,
    0,
    2.5,
    2**40,
    10**400,
    float("nan"),
    "x",
    "\ud800",
    "",
    [],
    [[]],
    [None],
    {},
    {"a": []},
]


def replacements(value: Any) -> Iterator[Any]:
    """The value with each of its parts, down to the last, replaced by each of the wrong ones in turn, or gone."""
    if isinstance(value, dict):
        for key, item in value.items():
            rest = {name: other for name, other in value.items() if name != key}
            yield rest
            for changed in (*WRONG, *replacements(item)):
                yield {**rest, key: changed}
    elif isinstance(value, list):
        for i, item in list(enumerate(value))[:2]:
            for changed in (*WRONG, *replacements(item)):
                yield [*value[:i], changed, *value[i + 1 :]]
