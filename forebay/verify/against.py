"""The answers of the engine beside another implementation of the model: an error that the plain path makes as well."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from forebay.base.errors import ConfigError
from forebay.verify.asking import Answer, Difference, Findings
from forebay.verify.questions import Question
from forebay.verify.run import Outcome, Verification
from forebay.verify.verdict import Verdict

if TYPE_CHECKING:
    from forebay.models.transformers_model import TransformersModel

TRANSFORMERS: Final = "transformers"
NAME: Final = f"against {TRANSFORMERS}"
# Nats by which the token that we choose may be less likely there: rounding of activations, by their type.
_MARGINS: Final = {"float32": 0.01}
_MARGIN: Final = 0.5
_MAX_REASON: Final = 200  # characters


def is_plain(question: Question) -> bool:
    """Return whether the answer's tokens are the likeliest ones by the logits alone."""
    params = question.params
    changed = params.repetition_penalty != 1 or params.frequency_penalty or params.presence_penalty
    return not (params.temperature or changed or params.grammar)


async def against_transformers(verification: Verification) -> Outcome:
    """Compare the greedy answers given alone with transformers' logits at each of their tokens.

    An answer differs from the first token on that is less likely there than the likeliest by more than a margin, which
    is wider for types of 16 bits. Raises ConfigError if transformers is not installed.
    """
    began = time.monotonic()
    try:
        from forebay.models.transformers_model import TransformersModel
    except ImportError:
        raise ConfigError(
            f"--against {TRANSFORMERS} needs the package of this name: pip install {TRANSFORMERS}"
        ) from None
    path = Path(verification.config.model_path)
    if path.is_file():
        return Outcome(NAME, Verdict.LEFT_OUT, f"{path.name} is a GGUF file: give the folder of the unquantized model")
    try:
        model = await asyncio.to_thread(TransformersModel, path)
    except Exception as error:  # whatever its models raise
        return Outcome(NAME, Verdict.LEFT_OUT, " ".join(str(error).split())[:_MAX_REASON])
    outcome = compared(NAME, model, verification)
    outcome.seconds = time.monotonic() - began
    return outcome


def compared(name: str, model: TransformersModel, verification: Verification) -> Outcome:
    """Return the outcome for all plain questions of a verification that has asked them alone."""
    findings, margin, apart = Findings(), 0.0, 0.0
    bound = _MARGINS.get(str(verification.config.types.dtype), _MARGIN)
    for question, answer in zip(verification.questions, verification.baseline.alone, strict=True):
        if not is_plain(question) or not question.prompt or not answer.tokens:
            continue
        places = model.places(question.prompt, answer.tokens, _said(answer))
        findings.num_answers += 1
        findings.num_tokens += len(places)
        margin = max(margin, *(place.margin for place in places))
        apart = max(apart, *(place.apart for place in places))
        wrong = next((number for number, place in enumerate(places) if place.margin > bound), None)
        if wrong is not None:
            prompt = question.number, len(question.prompt), question.way, question.adapter
            best, ours = places[wrong].best, answer.tokens[wrong]
            findings.differences.append(Difference(*prompt, wrong, best, ours, places[wrong].margin))
    what = (
        f"{findings.num_tokens} greedy tokens are at most {margin:.2g} nats below its likeliest ones, with up to "
        f"{bound} allowed; log-probabilities are up to {apart:.2g} apart"
    )
    verdict = Verdict.DIFFERENT if findings.differences else Verdict.SAME if findings.num_tokens else Verdict.NOT_SHOWN
    return Outcome(name, verdict, what, findings)


def _said(answer: Answer) -> list[dict[int, float]]:
    return [
        {token: entry.logprob, **dict(zip(entry.top_ids, entry.top_logprobs, strict=True))}
        for token, entry in zip(answer.tokens, answer.logprobs, strict=True)
    ]
