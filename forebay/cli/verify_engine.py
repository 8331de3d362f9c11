"""`forebay verify MODEL`: whether anything around a request changes its tokens, on this machine and with this model."""

from __future__ import annotations

import asyncio
import json
import shlex
import textwrap
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from rich.console import Console

from forebay.base.errors import ConfigError
from forebay.base.log import setup_logging
from forebay.base.package import __version__
from forebay.cli.arguments import Parser, whole
from forebay.cli.verify_self_test import run_self_test
from forebay.config.machine import cpu_model
from forebay.config.server_args import BY_NAME
from forebay.verify.against import NAME, TRANSFORMERS, against_transformers
from forebay.verify.asking import Difference
from forebay.verify.circumstances import Circumstance
from forebay.verify.run import TIERS, Outcome, Verification
from forebay.verify.self_test import LEAST_QUESTIONS, LEAST_TOKENS
from forebay.verify.verdict import COLUMNS, STYLES, Verdict, exit_code, table_lines

# Options with a value that a repetition of one circumstance replaces, or has no use for.
_NOT_REPEATED: Final = ("--only", "--settings", "--report", "--at-least", "--against")


def _parser() -> Parser:
    summary = (
        "Ask a model the same things alone and in all that an engine does around a request (load, chunks, cached, "
        "evicted and retracted memory, drafts, sleep, prefill and decode apart), and compare token by token. Exit "
        "code 1 if an answer differs or a request fails, 2 if fewer circumstances were shown than --at-least: a "
        "circumstance is shown if it came about for each way of choosing tokens, but for ways that only questions made "
        "of answers have (a bad word, a least length). Circumstances that the model or the machine cannot have are "
        "left out, and not required."
    )
    examples = ["", "./my-model --quantization int8", "--only cache --requests 64"]
    parser = Parser("verify", summary, "[MODEL] [options]", examples)
    parser.option("--url", metavar="URL", help="ask a running server instead; see `forebay verify --url= --help`")
    parser.option("--requests", type=whole(2, 256), default=18, metavar="N", help="how many are asked")
    parser.option("--max-tokens", "-n", type=whole(8, 4096), default=32, metavar="N", help="tokens of each answer")
    parser.option("--seed", type=whole(0), default=0, metavar="N", help="of the prompts and the draws")
    parser.option("--only", metavar="WORD", help="circumstances with this word in their names")
    parser.option("--settings", metavar="NAMES", help="of the circumstance --only names, with these settings alone")
    parser.option(
        "--at-least",
        type=whole(0),
        metavar="N",
        help="circumstances that must be shown",
        default_text="all that this model and machine take, and one",
    )
    parser.option("--against", choices=(TRANSFORMERS,), help="compare greedy answers with its logits, if installed")
    parser.option(
        "--self-test",
        action="store_true",
        help=f"plant faults in the engines, which must be found, with {LEAST_QUESTIONS} requests of {LEAST_TOKENS} "
        "tokens at least",
    )
    parser.option("--report", metavar="FILE", help="write what was found there, in Markdown")
    parser.option("--json", action="store_true", help="for programs")
    parser.engine_flags(server=False, model_is_positional=True)
    return parser


def run(words: Sequence[str]) -> int:
    """Print the outcome of each circumstance. Return 1 if an answer differs or a request fails, and 2 if fewer
    circumstances were shown than `--at-least`."""
    parsed = _parser().parse(words)
    tiers = {"enable_hisparse": True} if any(name.startswith(TIERS) for name in parsed.values) else {}
    parsed.resolve(log_level="error", **tiers)  # fetches the model, and refuses what cannot be
    setup_logging("error", process="client")
    own, console = parsed.own, Console(quiet=parsed.own.json, highlight=False, markup=False, soft_wrap=True)
    num, max_tokens = own.requests, own.max_tokens
    if own.self_test:
        num, max_tokens = _of_self_test(num, max_tokens, console)
    verification = Verification(parsed.values, num=num, max_tokens=max_tokens, seed=own.seed)
    _check_varied(parsed.flags, verification)
    if own.self_test:
        return asyncio.run(run_self_test(verification, own.only or "", console))
    chosen = _chosen(verification, own.only or "", own.settings)
    if own.report:
        _check_writable(own.report)
    outcomes = asyncio.run(_verify(verification, chosen, console, words, against=bool(own.against)))
    if own.json:
        print(json.dumps([asdict(outcome) for outcome in outcomes], indent=2))
    if own.report:
        Path(own.report).write_text(_markdown(outcomes, verification, words))
    return exit_code(outcomes, _all_taken(outcomes) if own.at_least is None else own.at_least)


def _of_self_test(num: int, max_tokens: int, console: Console) -> tuple[int, int]:
    """Return how many questions a test of the test asks and the tokens of each answer, and print them if they are not
    what was asked."""
    least = max(num, LEAST_QUESTIONS), max(max_tokens, LEAST_TOKENS)
    if least != (num, max_tokens):
        asked, taken = f"{num} of {max_tokens} tokens", f"{least[0]} requests of {least[1]} tokens"
        console.print(f"{taken}, not {asked}: with fewer an unpadded tail may not be found")
    return least


def _check_varied(flags: Iterable[str], verification: Verification) -> None:
    for name in flags:
        if name in verification.varied:
            raise ConfigError(f"{BY_NAME[name].option} is among what is varied here: leave it out")


def _check_writable(report: str) -> None:
    """Raise ConfigError if the report cannot be written, before minutes are spent."""
    try:
        Path(report).touch()
    except OSError as error:
        raise ConfigError(f"--report {report} cannot be written: {error.strerror}") from error


def _all_taken(outcomes: Sequence[Outcome]) -> int:
    """Return the number of circumstances that the model and the machine take, and 1 if they take none. The comparison
    with transformers, which is asked for by name, is among them if it was left out, too."""
    return max(1, sum(outcome.verdict is not Verdict.LEFT_OUT or outcome.name == NAME for outcome in outcomes))


def _chosen(verification: Verification, word: str, settings: str | None) -> list[Circumstance]:
    """Return the circumstances with a word in their names; with `settings` the one of that name, with these of its
    settings alone. Raises ConfigError if there are none."""
    if settings is not None:
        return [_with_settings(verification, word, settings)]
    chosen = [one for one in verification.circumstances if word.lower() in one.name.lower()]
    if not chosen:
        known = ", ".join(one.name for one in verification.circumstances)
        raise ConfigError(f"--only {word}: no circumstance has that in its name; there are: {known}")
    return chosen


def _with_settings(verification: Verification, name: str, settings: str) -> Circumstance:
    found = next((one for one in verification.circumstances if one.name == name), None)
    if found is None:
        known = ", ".join(one.name for one in verification.circumstances)
        raise ConfigError(f"--settings is for one circumstance: give its whole name with --only, one of: {known}")
    names = {part.strip() for part in settings.split(",") if part.strip()}
    if unknown := sorted(names - found.settings.keys()):
        known = ", ".join(found.settings) or "none"
        raise ConfigError(f"--settings {', '.join(unknown)}: the settings of {name!r} are {known}")
    return found.with_settings(names)


async def _verify(
    verification: Verification, chosen: Sequence[Circumstance], console: Console, words: Sequence[str], *, against: bool
) -> list[Outcome]:
    """Report each circumstance as it ends, the comparison with transformers first, and all of them at the end."""
    began = time.monotonic()
    console.print(f"{_asked(verification)}\n")
    outcomes = []

    def report(outcome: Outcome) -> None:
        outcomes.append(outcome)
        console.print("\n".join(_lines(outcome, verification, words)), style=STYLES.get(outcome.verdict))

    with console.status("alone, one at a time") as status:
        await verification.ask_alone()
        if against:
            status.update(TRANSFORMERS)
            report(await against_transformers(verification))
        for circumstance in chosen:
            status.update(circumstance.name)
            report(await verification.outcome(circumstance))
    verdict = f"{summary_of(outcomes)} ({time.monotonic() - began:.0f} s)"
    console.print(f"\n{textwrap.fill(verdict, COLUMNS - 1)}")
    return outcomes


def _asked(verification: Verification) -> str:
    lengths = [len(question.prompt) for question in verification.questions]
    return (
        f"{verification.config.served_model_name}: {len(lengths)} prompts of {min(lengths)} to {max(lengths)} tokens, "
        f"up to {verification.max_tokens} more behind each"
    )


def _lines(outcome: Outcome, verification: Verification, words: Sequence[str]) -> Iterator[str]:
    differences = [_difference_text(difference, verification) for difference in outcome.findings.differences]
    yield from table_lines(outcome.verdict, outcome.name, outcome.what, differences)
    yield from blame_lines(outcome, words)


def blame_lines(outcome: Outcome, words: Sequence[str]) -> Iterator[str]:
    """Yield the settings that are enough for a difference, and the command that repeats it; `words` are those given."""
    found = outcome.blame
    if found is None:
        return
    names = ", ".join(found.settings) or "none: other requests are enough"
    size = "smallest settings" if found.is_smallest else "settings"
    yield f"{size} with which answers differ ({found.num_runs} runs): {names}"
    repeated = [f"--only={outcome.name}", f"--settings={','.join(found.settings)}"]
    yield f"again: {shlex.join(['forebay', 'verify', *_kept(words), *repeated])}"


def _kept(words: Sequence[str]) -> Iterator[str]:
    """Yield those of the words given that a repetition of one circumstance needs: no report is overwritten."""
    left = iter(words)
    for word in left:
        if word in _NOT_REPEATED:
            next(left, None)
        elif word.partition("=")[0] not in (*_NOT_REPEATED, "--json"):
            yield word


def _difference_text(difference: Difference, verification: Verification) -> str:
    expected, found = (
        "an end" if token is None else repr(verification.tokenizer.decode([token]))
        for token in (difference.expected, difference.found)
    )
    gap = "" if difference.gap is None else f", which alone was {difference.gap:.3g} nats likelier"
    adapter = f", adapter {difference.adapter}" if difference.adapter else ""
    where = f"prompt {difference.number} ({difference.prompt_len} tokens, {difference.way}{adapter})"
    return f"{where}, token {difference.place}: {found} instead of {expected}{gap}"


def summary_of(outcomes: Sequence[Outcome]) -> str:
    """One sentence about all of them."""
    counts = Counter(outcome.verdict for outcome in outcomes)
    others = "".join(f", {number} {verdict}" for verdict, number in counts.items() if verdict is not Verdict.SAME)
    found = [outcome.findings for outcome in outcomes]
    num_tokens, num_answers = sum(one.num_tokens for one in found), sum(one.num_answers for one in found)
    gap = max((one.largest_logprob_gap for one in found), default=0.0)
    bits = "equal to the bit" if gap == 0.0 else f"up to {gap:.2g} apart"
    return (
        f"{counts[Verdict.SAME]} of {len(outcomes)} circumstances change no token{others}. Compared: {num_tokens:,} "
        f"tokens of {num_answers:,} answers; the log-probabilities of equal ones are {bits}."
    )


def _markdown(outcomes: Sequence[Outcome], verification: Verification, words: Sequence[str]) -> str:
    config, command = verification.config, shlex.join(["forebay", "verify", *words])
    rows = [
        f"| {outcome.verdict} | {outcome.name} | {outcome.what.replace('|', '/')} | {outcome.findings.num_answers} | "
        f"{outcome.findings.num_tokens} | {outcome.seconds:.1f} |"
        for outcome in outcomes
    ]
    differences = [
        f"- {outcome.name}: {_difference_text(one, verification)}"
        for outcome in outcomes
        for one in outcome.findings.differences
    ]
    blamed = [f"- {outcome.name}: {line}" for outcome in outcomes for line in blame_lines(outcome, words)]
    return "\n".join(
        [
            f"# {config.served_model_name}: do the same requests get the same tokens?",
            "",
            f"`{command}` with Forebay {__version__} on {cpu_model()}: {config.device}, {config.kernels} kernels, "
            f"{config.num_threads} threads, {config.types.dtype}, KV in {config.types.kv_cache_dtype}, quantization "
            f"{config.quantization}. {_asked(verification)}.",
            "",
            summary_of(outcomes),
            "",
            "| | circumstance | how far it came about | answers | tokens | seconds |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
            *differences,
            *blamed,
        ]
    )
