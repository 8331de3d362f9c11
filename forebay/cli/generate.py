"""`forebay generate`: one prompt in, its continuation on standard output as it comes."""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from forebay.base.errors import ConfigError
from forebay.cli.arguments import Parser
from forebay.cli.local import LocalModel, local_model
from forebay.requests.sampling_params import MAX_SEED, SamplingParams

MAX_PROMPT_BYTES = 64 << 20


def run(words: Sequence[str]) -> int:
    parser = Parser("generate", "Complete a prompt; `-` reads it from standard input.", "PROMPT|- [options]")
    parser.option("prompt", nargs="?", help="the text to continue, or - for standard input")
    parser.option("--file", metavar="FILE", help="read the prompt from a file instead")
    parser.option("--chat", action="store_true", help="take it as a user's message and apply the chat template")
    add_sampling(parser, temperature=0.0, max_tokens=128)
    parser.engine_flags(server=False, model_is_positional=False)
    parsed = parser.parse(words)
    prompt = _prompt(parsed.own)
    config = parsed.resolve(max_running_requests=1, log_level="warning")

    async def complete() -> None:
        async with local_model(config) as model:
            await _complete(model, prompt, parsed.own)

    asyncio.run(complete())
    return 0


def add_sampling(parser: Parser, *, temperature: float, max_tokens: int | None) -> None:
    """The options that `sampling` reads."""
    parser.option("--max-tokens", type=int, default=max_tokens, metavar="N", help="most tokens to generate")
    parser.option("--temperature", type=float, default=temperature, metavar="X", help="0 takes the likeliest token")
    parser.option("--top-p", type=float, default=1.0, metavar="P", help="keep the likeliest tokens up to this share")
    parser.option("--top-k", type=int, default=0, metavar="N", help="keep this many tokens, 0 for all")
    parser.option("--min-p", type=float, default=0.0, metavar="P", help="drop what is less likely than P x the best")
    parser.option("--seed", type=int, metavar="N", help="of the random draws", default_text="random")


def sampling(own: argparse.Namespace, max_new_tokens: int) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=own.temperature,
        top_p=own.top_p,
        top_k=own.top_k,
        min_p=own.min_p,
        seed=secrets.randbelow(MAX_SEED) if own.seed is None else own.seed,
    )


def _prompt(own: argparse.Namespace) -> str:
    if (own.prompt is None) == (own.file is None):
        raise ConfigError("give one prompt: a text, - for standard input, or --file FILE")
    if own.file is None and own.prompt != "-":
        return str(own.prompt)
    try:
        data = sys.stdin.buffer.read(MAX_PROMPT_BYTES) if own.file is None else Path(own.file).read_bytes()
        return data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the prompt cannot be read: {error}") from None


async def _complete(model: LocalModel, prompt: str, own: argparse.Namespace) -> None:
    if own.chat:
        ids = model.tokenizer.encode_chat([{"role": "user", "content": prompt}], max_tokens=model.context_length)
    else:
        ids = model.tokenizer.encode(prompt, max_tokens=model.context_length)
    params = sampling(own, model.room(len(ids), own.max_tokens))
    async for piece in model.stream(ids, params):
        print(piece, end="", flush=True)
    print()
