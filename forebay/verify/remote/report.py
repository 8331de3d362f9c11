"""The outcomes for people and programs: lines of a table, JSON, and a page with both texts of each difference."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from html import escape
from typing import Any, Final

from forebay.base.package import __version__
from forebay.verify.remote.replies import Difference, first_unequal_word
from forebay.verify.remote.run import Comparison, Outcome, verdict_text
from forebay.verify.verdict import VERDICT_COLUMNS, Verdict, table_lines


def asked_text(comparison: Comparison) -> str:
    """Return what is asked, in one line."""
    lengths = [one.reply.prompt_tokens or one.question.num_tokens for one in comparison.alone]
    tokens = "with log-probabilities" if comparison.servers[0].gives_logprobs else "without log-probabilities"
    return (
        f"{comparison.servers[0].model} at {comparison.servers[0].url}: {len(lengths)} prompts of {min(lengths):,} to "
        f"{max(lengths):,} tokens, up to {comparison.max_tokens} more behind each, {tokens}"
    )


def left_out_lines(comparison: Comparison) -> Iterator[str]:
    """Yield a line for each question that the server refuses or fails at, and one for those that were not asked."""
    for one in comparison.unanswered:
        yield f"{one.verdict:<{VERDICT_COLUMNS}}{one.question.way}, {one.question.num_tokens:,} tokens: {one.reason}"
    num_skipped = len(comparison.questions) - len(comparison.alone) - len(comparison.unanswered)
    if num_skipped:
        yield f"left out  the {num_skipped} longest prompts: no time, or the server failed; --budget gives more time"


def outcome_lines(outcome: Outcome) -> Iterator[str]:
    """Return the lines of the table for one outcome: verdict, name, proof, then the first differences."""
    differences = [difference_text(difference) for difference in outcome.findings.differences]
    return table_lines(outcome.verdict, outcome.name, _what(outcome), differences)


def _what(outcome: Outcome) -> str:
    findings, gap = outcome.findings, outcome.findings.largest_logprob_gap
    equal = findings.num_answers - len(findings.differences)
    counts = f"{equal} of {findings.num_answers} answers equal" if outcome.verdict is Verdict.DIFFERENT else ""
    apart = f"log-probabilities up to {gap:.2g} apart" if gap else ""
    return "; ".join(filter(None, (counts, outcome.what, apart)))


def difference_text(difference: Difference) -> str:
    """Return one difference in a line: the question, the place, both pieces, and how close the choice was."""
    gap = "" if difference.gap is None else f", which alone was {difference.gap:.3g} nats likelier"
    unit = "token" if difference.unit == "token" else f"character of the {difference.unit}"
    where = f"prompt {difference.question} ({difference.num_tokens:,} tokens, {difference.way}), {unit}"
    return f"{where} {difference.place}: {difference.found!r} instead of {difference.expected!r}{gap}"


def summary_text(outcomes: Sequence[Outcome]) -> str:
    """Return the counts and the verdict."""
    counts = {verdict: sum(outcome.verdict is verdict for outcome in outcomes) for verdict in Verdict}
    others = "".join(
        f", {number} {verdict}" for verdict, number in counts.items() if number and verdict is not Verdict.SAME
    )
    num_answers = sum(outcome.findings.num_answers for outcome in outcomes)
    gap = max((outcome.findings.largest_logprob_gap for outcome in outcomes), default=0.0)
    known = any(outcome.findings.num_logprobs for outcome in outcomes)
    apart = f" Log-probabilities of equal tokens are {f'up to {gap:.2g} apart' if gap else 'equal'}." if known else ""
    return (
        f"{counts[Verdict.SAME]} of {len(outcomes)} circumstances change no answer{others}. Compared: {num_answers} "
        f"answers.{apart} Verdict: {verdict_text(outcomes)}."
    )


def as_json(comparison: Comparison, outcomes: Sequence[Outcome]) -> str:
    """Return everything for programs."""
    value: dict[str, Any] = {
        "servers": [server.url for server in comparison.servers],
        "model": comparison.servers[0].model,
        "asked": asked_text(comparison),
        "unanswered": [
            {"way": one.question.way, "reason": one.reason, "verdict": one.verdict} for one in comparison.unanswered
        ],
        "verdict": verdict_text(outcomes),
        "outcomes": [asdict(outcome) for outcome in outcomes],
    }
    return json.dumps(value, indent=2)


_STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; color: #1c2430 }
table { border-collapse: collapse; width: 100% } th, td { text-align: left; padding: .35rem .7rem; vertical-align: top }
tr + tr td { border-top: 1px solid #d9dee5 } .same { color: #1a7f37 } .different, .failed { color: #b42318 }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f5f7f9; padding: .7rem; margin: 0 }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 1rem } mark { background: #ffe08a }
"""


def as_html(comparison: Comparison, outcomes: Sequence[Outcome], command: str) -> str:
    """Return one page: the table, then the texts of each difference side by side, marked from where they differ."""
    rows = "\n".join(
        f'<tr><td class="{outcome.verdict.replace(" ", "-")}">{outcome.verdict}</td><td>{escape(outcome.name)}</td>'
        f"<td>{escape(_what(outcome))}</td><td>{outcome.seconds:.1f} s</td></tr>"
        for outcome in outcomes
    )
    pairs = "\n".join(
        f"<h3>{escape(outcome.name)}: {escape(difference_text(difference))}</h3>\n{_pair(difference)}"
        for outcome in outcomes
        for difference in outcome.findings.differences
    )
    unanswered = "".join(f"<li>{escape(line)}</li>" for line in left_out_lines(comparison))
    title = "Does anything around a request change its answer?"
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>
<h1>{title}</h1>
<p>{escape(asked_text(comparison))}.</p>
{f"<ul>{unanswered}</ul>" if unanswered else ""}
<p><b>{escape(summary_text(outcomes))}</b></p>
<table><tr><th></th><th>circumstance</th><th>how far it came about</th><th>time</th></tr>
{rows}
</table>
{f"<h2>Differences</h2>{pairs}" if pairs else ""}
<p><code>{escape(command)}</code> with Forebay {__version__}</p>
</html>
"""


def _pair(difference: Difference) -> str:
    expected, found = difference.texts
    same = first_unequal_word(expected, found)
    sides = (f"<pre>{escape(text[:same])}<mark>{escape(text[same:])}</mark></pre>" for text in (expected, found))
    return f'<div class="pair"><div>alone{next(sides)}</div><div>here{next(sides)}</div></div>'
