"""The adapter (LoRA) of a command that starts an engine for one person: `--lora PATH|NAME`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from forebay.base.errors import ConfigError
from forebay.cli.arguments import Parsed, Parser

_OWN_NAME: Final = "adapter"


def add_lora(parser: Parser) -> None:
    """Declare `--lora`."""
    parser.option(
        "--lora",
        metavar="PATH|NAME",
        help="answer with this adapter (LoRA): a folder, org/name of the Hugging Face hub, or a name of --lora-modules",
    )


def with_adapter(parsed: Parsed) -> tuple[Parsed, str]:
    """Return the settings with the adapter of `--lora` among those to load, and its name; without the option the
    settings as they are, and "". A name of `--lora-modules` means that one, anything else is a path or a hub's name."""
    wanted = parsed.own.lora
    if wanted is None:
        return parsed, ""
    values = parsed.values
    modules = tuple(map(str, written)) if isinstance(written := values.get("lora_modules"), tuple) else ()
    names = {module.partition("=")[0].strip() for module in modules}
    flags: dict[str, object] = {**parsed.flags, "enable_lora": True}
    if wanted in names:
        return replace(parsed, flags=flags), wanted
    name = Path(wanted).name.partition("=")[0] or _OWN_NAME
    if name in names:
        raise ConfigError(f"--lora {wanted} and --lora-modules have two adapters of the name {name}: name one")
    flags["lora_modules"] = (*modules, f"{name}={wanted}")
    if "max_loras" not in values:
        flags["max_loras"] = len(modules) + 1
    return replace(parsed, flags=flags), name
