"""`forebay models make`: a small random model of any kind that is served, to try things with."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from forebay.base.errors import ConfigError
from forebay.base.progress import byte_progress
from forebay.base.units import human_bytes
from forebay.cli.arguments import Parser, whole
from forebay.families.config.model_config import config_from_folder, config_from_gguf
from forebay.families.small import DEFAULT_HIDDEN_SIZE, DEFAULT_NUM_LAYERS, LIKES, small_config
from forebay.families.small_pictures import SMALL, template
from forebay.formats.gguf import GgufFile
from forebay.formats.safetensors import SINGLE_NAME
from forebay.formats.store import find_model, models_folder
from forebay.text.tokenizer_saving import save_tokenizer

DTYPES: Final = ("bfloat16", "float16", "float32")


def add_options(parser: Parser) -> None:
    """Declare the options of `models make`."""
    parser.option("--like", metavar="TYPE", help=f"make: the kind of model: {', '.join(LIKES)}")
    parser.option("--out", metavar="FOLDER", help="make: where to", default_text="NAME in the cache")
    parser.option("--hidden-size", type=whole(1, 1 << 16), default=DEFAULT_HIDDEN_SIZE, metavar="N", help="make: width")
    parser.option("--num-layers", type=whole(1, 1024), default=DEFAULT_NUM_LAYERS, metavar="N", help="make: depth")
    parser.option("--dtype", choices=DTYPES, default=DTYPES[0], metavar="TYPE", help="make: of the weights")
    parser.option("--seed", type=whole(0), default=0, metavar="N", help="make: of the weights")
    parser.option("--draft-head", action="store_true", help="make: with a head that drafts tokens (MTP)")
    parser.option("--set", action="append", metavar="FIELD=VALUE", help="make: any field of config.json, repeatable")


def make(name: str | None, own: argparse.Namespace) -> Path:
    """Write the model and return its folder. ConfigError for a name that is taken, and for a model that cannot be."""
    if own.like is None:
        raise ConfigError("say what it shall be like: `forebay models make NAME --like falcon_h1`")
    target = _target(name, own.out)
    donor = GgufFile(find_model(None))
    fields = _fields(donor, own)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".make-") as scratch:
            made = Path(scratch) / target.name
            made.mkdir()
            _write_texts(made, donor, own.like)
            _write_model(made, fields, own)
            os.rename(made, target)  # in one step: a folder is there whole, or not at all
    except OSError as error:
        raise ConfigError(f"{target} cannot be written ({error})") from error
    return target


def _target(name: str | None, out: str | None) -> Path:
    if out is None and (not name or name != Path(name).name or name.startswith(".")):
        raise ConfigError(f"{name or ''!r} is no plain name for a model: `forebay models make NAME --like TYPE`")
    target = models_folder() / str(name) if out is None else Path(out).expanduser().absolute()
    if os.path.lexists(target):
        raise ConfigError(f"{target} is there already: remove it, or choose another name or --out")
    return target


def _fields(donor: GgufFile, own: argparse.Namespace) -> dict[str, Any]:
    """The new config.json; tokens are the default model's, whose tokenizer comes with it."""
    tokens = config_from_gguf(donor)
    small = small_config(own.like, hidden_size=own.hidden_size, num_layers=own.num_layers, vocab_size=tokens.vocab_size)
    return {
        **small,
        "dtype": own.dtype,
        "bos_token_id": tokens.bos_token_id,
        "eos_token_id": list(tokens.eos_token_ids),
        **({"num_nextn_predict_layers": 1} if own.draft_head else {}),
        **_given(own.set or ()),
    }


def _given(assignments: Sequence[str]) -> dict[str, Any]:
    """Parse `layer_types=["conv"]` as JSON; a value that is not JSON is text."""
    given: dict[str, Any] = {}
    for assignment in assignments:
        field, equals, value = assignment.partition("=")
        if not field or not equals:
            raise ConfigError(f"--set {assignment}: write FIELD=VALUE")
        try:
            given[field] = json.loads(value)
        except ValueError:
            given[field] = value
    return given


def _write_texts(folder: Path, donor: GgufFile, like: str) -> None:
    """The tokenizer, and of a model that reads pictures the files of its processors."""
    if like not in SMALL:
        save_tokenizer(donor.metadata, folder)
        return
    save_tokenizer(donor.metadata, folder, more=SMALL[like].tokens, template=template(like))
    for name, fields in SMALL[like].files.items():
        (folder / name).write_text(json.dumps(fields, indent=2), "utf-8")


def _write_model(folder: Path, fields: dict[str, Any], own: argparse.Namespace) -> None:
    from forebay.models.random_weights import write_random_weights  # brings torch, which nothing but this needs here

    (folder / "config.json").write_text(json.dumps(fields, indent=2), "utf-8")
    config = config_from_folder(folder)
    with byte_progress("weights") as progress:
        path = folder / SINGLE_NAME
        count = write_random_weights(
            config, path, dtype=own.dtype, seed=own.seed, draft_head=own.draft_head, progress=progress
        )
    size = human_bytes(path.stat().st_size)
    print(f"{config.model_type}: {config.num_layers} layers, {count / 1e6:,.1f} M weights, {size}", file=sys.stderr)
