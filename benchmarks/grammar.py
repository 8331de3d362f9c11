"""What grammars cost: masks, tokens, first tokens.

    python benchmarks/grammar.py [MODEL] [--streams 1 16] [--tokens 96] [--repeats 3]

Of the embedded model by default, in this process, with a schema of 2 KB. `mask` is the time of one row's words of bits
while an output is read token by token, over five kinds of grammars. `tokens/s` are of the same prompts with and without
the schema, one run after the other; the ratio is that of the fastest. `first token` is what one adds that is
new to the engine, or known to it, and `check` what the server does before.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask_par
from msgspec.structs import replace

from forebay.base.units import ceil_div
from forebay.engine.client.llm import LLM
from forebay.grammar.checking import GrammarChecks
from forebay.grammar.compiler import compiled
from forebay.grammar.vocabulary import Vocabulary
from forebay.requests.sampling_params import Grammar, GrammarKind, SamplingParams

_PROMPT = "A list of the customers of a small shop, as JSON: "
_WARM = 3


def _schema(title: str = "customers") -> dict[str, Any]:
    """2 KB; its outputs are longer than any that is asked for here."""
    text = {"type": "string", "minLength": 1, "maxLength": 40}
    fields = {f"{name}_{i}": {**text, "description": f"{name} {i}"} for name in ("name", "street") for i in range(8)}
    kinds = {"kind": {"enum": ["new", "known", "lost"]}, "age": {"type": "integer", "minimum": 0, "maximum": 120}}
    tags = {"tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 1, "maxItems": 4}}
    properties = {**kinds, "since": {"type": "string", "format": "date"}, **tags, **fields}
    item = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"title": title, "type": "array", "minItems": 20, "items": item}


def _grammar(title: str = "customers") -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(_schema(title)))


def _line(name: str, *figures: str) -> None:
    print(f"{name:<34}", *figures, flush=True)


def _masks(tokenizer: LLTokenizer, vocab_size: int) -> None:
    outputs = {
        _grammar(): json.dumps([{"kind": "new", "age": 33, "since": "2021-03-04", "tags": ["a", "of two words"]}])[:-2],
        Grammar(GrammarKind.JSON_OBJECT): json.dumps({"a": [1, 2.5, {"deep": None}], "text": "some words " * 8}),
        Grammar(GrammarKind.REGEX, "([A-Z][a-z]+ )+[0-9]{3,5}"): "Some Words In One Row And Then Some More 1234",
        Grammar(GrammarKind.CHOICE, '["yes", "no", "it depends on the weather"]'): "it depends on the weather",
    }
    words = np.zeros((1, ceil_div(vocab_size, 32)), dtype=np.int32)
    executor, times = LLExecutor(), []
    for grammar, text in outputs.items():
        prototype = compiled(grammar, tokenizer)
        for _ in range(_WARM):
            matcher = prototype.deep_copy()
            for token in tokenizer.tokenize_str(text):
                begin = time.perf_counter()
                fill_next_token_bitmask_par(executor, [(matcher, 0)], words)
                times.append(time.perf_counter() - begin)
                if not matcher.consume_token(token):
                    raise SystemExit(f"{grammar.kind}: {matcher.get_error()}")
    times.sort()
    p99 = times[int(0.99 * len(times))]
    _line("mask of a row, median and p99", f"{statistics.median(times) * 1e6:.0f} us", f"{p99 * 1e6:.0f} us")


def _seconds(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _rates(llm: LLM, streams: Sequence[int], num_tokens: int, repeats: int) -> None:
    for count in streams:
        prompts = [f"{_PROMPT}{i} " for i in range(count)]
        free = SamplingParams(max_tokens=num_tokens, temperature=0.8, seed=1, ignore_eos=True)
        bound = replace(free, ignore_eos=False, grammar=_grammar())
        runs = {name: partial(llm.generate, prompts, how) for name, how in (("free", free), ("bound", bound))}
        times: dict[str, list[float]] = {"free": [], "bound": []}
        for _ in range(repeats):
            for name, run in runs.items():
                times[name].append(_seconds(run))
        rates = {name: count * num_tokens / min(taken) for name, taken in times.items()}
        ratio = rates["bound"] / rates["free"]
        _line(
            f"tokens/s of {count} streams", f"{rates['free']:.1f} free", f"{rates['bound']:.1f} bound", f"{ratio:.3f}"
        )


def _first_tokens(llm: LLM, repeats: int) -> None:
    free = SamplingParams(max_tokens=1, temperature=0.0)
    known = replace(free, grammar=_grammar())
    times: dict[str, list[float]] = {"free": [], "known": [], "new": []}
    for i in range(4 * repeats):
        new = replace(free, grammar=_grammar(f"customers {i}"))
        for name, how in (("free", free), ("known", known), ("new", new)):
            times[name].append(_seconds(partial(llm.generate, [_PROMPT], how)))
    least = {name: min(taken) * 1e3 for name, taken in times.items()}
    for name in ("known", "new"):
        _line(f"first token, added by a {name} schema", f"{least[name] - least['free']:.2f} ms")


def _checks(vocabulary: Vocabulary, repeats: int) -> None:
    checks = GrammarChecks(lambda: vocabulary)
    start = _seconds(partial(checks.check, Grammar(GrammarKind.JSON_OBJECT)))
    new = [_seconds(partial(checks.check, _grammar(f"customers {i}"))) for i in range(4 * repeats)]
    known = [_seconds(partial(checks.check, _grammar("customers 0"))) for _ in range(20)]
    _line("check of a new, of a known schema", f"{min(new) * 1e3:.2f} ms", f"{min(known) * 1e3:.3f} ms")
    _line("check that starts the process", f"{start * 1e3:.0f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args()
    llm = LLM(asked.model, context_length=1024, max_running_requests=max(asked.streams), speculative_algorithm="off")
    vocabulary = Vocabulary.of(llm.tokenizer.table, llm.info.eos_token_ids, llm.info.vocab_size)
    _line("columns, bytes of the schema", str(llm.info.vocab_size), str(len(_grammar().text)))
    _masks(vocabulary.tokenizer(partial(llm.tokenizer.encode, add_special_tokens=False)), llm.info.vocab_size)
    _checks(vocabulary, asked.repeats)
    _first_tokens(llm, asked.repeats)
    _rates(llm, asked.streams, asked.tokens, asked.repeats)


if __name__ == "__main__":
    main()
