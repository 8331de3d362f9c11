"""`forebay generate`: one prompt in, its continuation on standard output as it comes."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from forebay.base.errors import ConfigError
from forebay.base.sampling import NUMBERS
from forebay.cli.adapter import add_lora, with_adapter
from forebay.cli.arguments import Parser, number, whole
from forebay.cli.local import LocalModel, local_model
from forebay.requests.sampling_params import RANDOM_SEED, SamplingParams

MAX_PROMPT_BYTES = 64 << 20
_OPTIONS = [number for number in NUMBERS.values() if number.option]


def run(words: Sequence[str]) -> int:
    """Print the continuation of one prompt and return the exit code."""
    parser = Parser("generate", "Complete a prompt, from standard input without one.", "[PROMPT|-] [options]")
    parser.option("prompt", nargs="?", help="the text to continue; - is standard input, as is none in a pipe")
    parser.option("--prompt", "-p", metavar="TEXT", dest="prompt_text", help="the same, as an option")
    parser.option("--file", metavar="FILE", help="read the prompt from a file instead")
    parser.option("--chat", action="store_true", help="take it as a user's message and apply the chat template")
    add_lora(parser)
    add_sampling(parser, max_tokens=128)
    parser.engine_flags(server=False, model_is_positional=False)
    parsed = parser.parse(words)
    prompt = _prompt(parsed.own)
    parsed, adapter = with_adapter(parsed)
    config = parsed.resolve(max_running_requests=1, log_level="warning")

    async def complete() -> None:
        async with local_model(config, adapter) as model:
            await _complete(model, prompt, parsed.own)

    asyncio.run(complete())
    return 0


def add_sampling(parser: Parser, *, max_tokens: int | None) -> None:
    """Add the options that `sampling` reads; those that are not given are None."""
    own: dict[str, Any] = {"default": None, "default_text": "the model's own"}
    parser.option("--max-tokens", "--max-new-tokens", "--n-predict", "-n", type=whole(1), default=max_tokens,
                  metavar="N", help="most tokens to generate")  # fmt: skip
    for declared in _OPTIONS:
        kind, metavar = (whole(0), "N") if declared.is_whole else (number(), "X")
        names = (f"--{declared.name.replace('_', '-')}", *declared.options)
        parser.option(*names, type=kind, metavar=metavar, help=declared.option, **own)
    parser.option("--seed", type=whole(RANDOM_SEED), default=RANDOM_SEED, metavar="N", help="of the random draws",
                  default_text="random")  # fmt: skip


def given(own: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling parameters that were given."""
    values = {number.name: getattr(own, number.name) for number in _OPTIONS}
    return {name: value for name, value in values.items() if value is not None}


def sampling(own: argparse.Namespace, defaults: SamplingParams, max_tokens: int) -> SamplingParams:
    """Return the model's default sampling parameters with the options given on the command line."""
    return msgspec.structs.replace(defaults, max_tokens=max_tokens, seed=own.seed, **given(own))


def _prompt(own: argparse.Namespace) -> str:
    """The text to continue. A last newline is the editor's or the shell's, not the text's."""
    if sum(given is not None for given in (own.prompt, own.prompt_text, own.file)) > 1:
        raise ConfigError("PROMPT, --prompt and --file all say what the prompt is: give one")
    named = own.prompt if own.prompt_text is None else own.prompt_text
    if named not in (None, "-"):
        return str(named)
    piped = named == "-" or (sys.stdin is not None and not sys.stdin.isatty())
    if own.file is None and not piped:
        raise ConfigError(
            "there is no prompt: give a text, --file FILE, or standard input (echo text | forebay generate)"
        )
    return _read_prompt(own.file)


def _read_prompt(file: str | None) -> str:
    """Read the prompt from a file, or from standard input for None. Raises ConfigError."""
    try:
        data = sys.stdin.buffer.read(MAX_PROMPT_BYTES) if file is None else Path(file).read_bytes()
        text = data.decode().removesuffix("\n").removesuffix("\r")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the prompt cannot be read: {error}") from None
    if not text:
        raise ConfigError(f"there is no prompt: {file or 'standard input'} is empty")
    return text


async def _complete(model: LocalModel, prompt: str, own: argparse.Namespace) -> None:
    if own.chat:
        ids = model.tokenizer.encode_chat([{"role": "user", "content": prompt}], max_tokens=model.context_length)
    else:
        ids = model.tokenizer.encode(prompt, parse_special=True, max_tokens=model.context_length)
    params = sampling(own, model.sampling, model.room(len(ids), own.max_tokens))
    async for piece in model.stream(ids, params):
        print(piece, end="", flush=True)
    print()
