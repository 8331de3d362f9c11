"""Settings of adapters (LoRA): flags, their values, and the combinations that are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from forebay.base.errors import ConfigError, InvalidRequest
from forebay.config.engine_config import NO_ADAPTERS, AdapterOptions
from forebay.config.flag import BOOL, COUNT, PAIRS, Flag, Settled, in_group

GROUP: Final = "adapters (LoRA)"
MOST_SLOTS: Final = 256
MOST_RANK: Final = 512
MAX_NAME: Final = 128  # characters

FLAGS: Final = in_group(
    GROUP,
    Flag(
        "enable_lora",
        BOOL,
        "serve adapters beside the model: a request names one by `model`; those without one compute as before",
        default=False,
    ),
    Flag(
        "lora_modules",
        PAIRS,
        "adapters to load at the start, one or several; a path is a folder of PEFT's, or org/name or "
        "org/name@revision of the Hugging Face hub",
        aliases=("--lora-paths",),
    ),
    Flag(
        "max_loras",
        COUNT,
        "adapters that are loaded at once; each has a slot of --max-lora-rank in memory",
        default=4,
        low=1,
        high=MOST_SLOTS,
        aliases=("--max-loras-per-batch",),
    ),
    Flag("max_lora_rank", COUNT, "largest rank of an adapter's layers", default=16, low=1, high=MOST_RANK),
)
OPTIONAL: Final = {
    "lora_modules": "none is loaded at the start",
    "lora_root": "none: no adapter can be loaded over HTTP",
}


def problems(settled: Settled, asked: Callable[[str], str], chosen: Callable[[str], bool]) -> Iterator[str]:
    """Yield one line for each setting that cannot work. `chosen` returns whether a setting was written."""
    if not settled["enable_lora"]:
        for name in ("lora_modules", "max_loras", "max_lora_rank", "lora_root"):
            if chosen(name):
                yield f"{asked(name)}: it has no effect without --enable-lora: add that flag"
        return
    try:
        modules = modules_of(settled)
        for name, _ in modules:
            if why := wrong_name(name, str(settled["served_model_name"])):
                raise ConfigError(f"{name[:200]!a}: {why}")
    except ConfigError as error:
        yield f"{asked('lora_modules')}: {error.message}"
        return
    if len(modules) > settled.number("max_loras"):
        yield (
            f"{asked('lora_modules')}: {len(modules)} adapters, and {settled['max_loras']} slots: give --max-loras "
            f"{len(modules)}"
        )


def modules_of(settled: Settled) -> tuple[tuple[str, str], ...]:
    """Return the names and paths of the adapters to load. Raises ConfigError for a text that is no such pair."""
    written = settled.get("lora_modules")
    found: dict[str, str] = {}
    for text in written if isinstance(written, tuple) else ():
        name, separator, path = str(text).partition("=")
        if not separator or not path.strip():
            raise ConfigError(f"{text[:200]!a} is not NAME=PATH")
        if name.strip() in found:
            raise ConfigError(f"{name.strip()!a} is there twice: give each adapter a name of its own")
        found[name.strip()] = path.strip()
    return tuple(found.items())


def check_name(name: str, model: str) -> None:
    """Raise InvalidRequest for a text that cannot be the name of an adapter of this model."""
    if why := wrong_name(name, model):
        raise InvalidRequest(f"{name[:200]!a}: {why}: choose another", param="lora_name")


def wrong_name(name: str, model: str) -> str:
    """Return the fault of an adapter's name beside the model's name; "" if it has none."""
    if name == model or name.startswith(f"{model}:"):
        return f"{model!a} and names that begin with '{model}:' are reserved for the model"
    if not name:
        return "a name is missing"
    if len(name) > MAX_NAME:
        return f"a name of {len(name)} characters: at most {MAX_NAME}"
    if not name.isprintable():
        return "a name has printable characters alone"
    return ""


def field_values(settled: Settled, find: Callable[[str], Path]) -> dict[str, Any]:
    """Return the values of the configuration's fields about adapters. `find` returns the folder of an adapter by its
    path or its name on the hub."""
    if not settled["enable_lora"]:
        return {"adapters": NO_ADAPTERS, "max_loras": 0}
    slots = settled.number("max_loras")
    modules = tuple((name, str(find(path))) for name, path in modules_of(settled))
    options = AdapterOptions(max_loras=slots, max_lora_rank=settled.number("max_lora_rank"), lora_modules=modules)
    return {"adapters": options, "max_loras": slots}
