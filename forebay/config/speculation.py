"""Settings of speculative decoding: flags, the values of "auto", and the combinations that are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from forebay.base.foreign import ABSENT_VALUES
from forebay.config.engine_config import SpeculationOptions, SpeculativeAlgorithm
from forebay.config.flag import COUNT, PATH, Decision, Flag, Kind, Settled, Value, in_group

GROUP: Final = "speculation"
PREFIX: Final = "speculative_"
MAX_WIDTH: Final = 16  # a step's graphs are captured for each width, and n-gram guesses gain little beyond
NGRAM_WIDTH: Final = 8  # by `benchmarks/ngram.py`
CHAIN_WIDTH: Final = 4  # the field's: three guesses of a head, each fed with the one before
DEFAULTS: Final = SpeculationOptions()
_WITH_DRAFT: Final = (
    SpeculativeAlgorithm.EAGLE,
    SpeculativeAlgorithm.EAGLE3,
    SpeculativeAlgorithm.FROZEN_KV_MTP,
    SpeculativeAlgorithm.STANDALONE,
)
_MAY_HAVE_DRAFT: Final = (*_WITH_DRAFT, SpeculativeAlgorithm.NEXTN)  # an assistant's name for FROZEN_KV_MTP


def _parse_algorithm(text: str) -> Value:
    word = text.strip().upper()
    return {"OFF": "off", "MTP": SpeculativeAlgorithm.NEXTN.value}.get(word, word)


ALGORITHM: Final = Kind("NAME", _parse_algorithm, str)

FLAGS: Final = in_group(
    GROUP,
    Flag(
        "speculative_algorithm",
        ALGORITHM,
        "proposer of draft tokens, verified several in one step, with the same output: NGRAM, by what "
        "followed before; NEXTN, by a head inside the checkpoint; EAGLE and the rest, by a draft model; auto, as far "
        "as it pays",
        choices=("auto", *(str(algorithm) for algorithm in SpeculativeAlgorithm)),
        absent=ABSENT_VALUES["speculative_algorithm"],
    ),
    Flag(
        "speculative_num_draft_tokens",
        COUNT,
        "most tokens of one request in a step: the last sampled one, and draft tokens behind it",
        low=2,
        high=MAX_WIDTH,
    ),
    Flag(
        "speculative_num_steps",
        COUNT,
        "most draft tokens in a row: --speculative-num-draft-tokens less one",
        aliases=("--num-speculative-tokens", "--draft-max", "--draft", "--draft-n"),
        low=1,
        high=MAX_WIDTH - 1,
    ),
    Flag("speculative_eagle_topk", COUNT, "draft tokens are chains: 1", default=1, low=1),
    Flag(
        "speculative_draft_model_path",
        PATH,
        "the head, assistant or smaller model that drafts",
        aliases=("--speculative-draft-model", "--speculative-model", "--model-draft", "-md"),
    ),
    Flag(
        "speculative_ngram_max_trie_depth",
        COUNT,
        "longest match, in tokens, and so the most draft tokens that follow one match",
        default=DEFAULTS.ngram_max_trie_depth,
        low=1,
        high=1 << 10,
    ),
    Flag(
        "speculative_ngram_capacity",
        COUNT,
        "tokens of recent outputs, of all requests, that are kept to propose draft tokens",
        default=DEFAULTS.ngram_capacity,
        low=1,
        high=1 << 26,
    ),
)


def algorithm_of(settled: Settled) -> SpeculativeAlgorithm:
    """Return the speculative algorithm of the settled flags as an enum."""
    return SpeculativeAlgorithm(str(settled["speculative_algorithm"]))


def _auto(facts: object, settled: Settled) -> Decision:
    if settled["device"] != "cpu":
        return Decision("off", "a GPU gains more from planning ahead, for which the last token is not known yet")
    if settled.get("overlap_depth"):
        return Decision("off", "NGRAM needs the last token on the host: --overlap-depth 0")
    return Decision("NGRAM", "what followed before, as far as it pays")


def _num_draft_tokens(facts: object, settled: Settled) -> Decision:
    algorithm = algorithm_of(settled)
    if algorithm is SpeculativeAlgorithm.OFF:
        return Decision(1, "nothing is guessed")
    if "speculative_num_steps" in settled:
        return Decision(settled.number("speculative_num_steps") + 1, "--speculative-num-steps and the token before")
    if algorithm is SpeculativeAlgorithm.NGRAM:
        return Decision(NGRAM_WIDTH, "a match of seven tokens is right more often than not")
    return Decision(CHAIN_WIDTH, "three guesses, each made from the one before")


def _num_steps(facts: object, settled: Settled) -> Decision:
    return Decision(settled.number("speculative_num_draft_tokens") - 1, "the guesses of --speculative-num-draft-tokens")


RULES: Final[Mapping[str, Callable[[object, Settled], Decision]]] = {
    "speculative_algorithm": _auto,
    "speculative_num_draft_tokens": _num_draft_tokens,
    "speculative_num_steps": _num_steps,
}
OPTIONAL: Final = {"speculative_draft_model_path": "none: nothing that guesses is a model of its own"}


def clashes(given: Mapping[str, object], written: Callable[[str], bool]) -> Iterator[tuple[str, str, str]]:
    """Pairs of settings that cannot both hold, and why; `given` has values by name."""
    if given["speculative_algorithm"] == SpeculativeAlgorithm.OFF:
        for flag in FLAGS[1:]:
            if written(flag.name):
                yield flag.name, "speculative_algorithm", "without guesses it has no effect: name an algorithm"
    tokens, steps = given["speculative_num_draft_tokens"], given["speculative_num_steps"]
    if isinstance(tokens, int) and isinstance(steps, int) and tokens != steps + 1:
        yield "speculative_num_steps", "speculative_num_draft_tokens", "the second is one more than the first: give one"


def problems(settled: Settled, asked: Callable[[str], str]) -> Iterator[str]:
    """One line for each."""
    algorithm, topk = algorithm_of(settled), settled.number("speculative_eagle_topk")
    if topk > 1:
        yield (
            f"{asked('speculative_eagle_topk')}: of a tree of guesses one path at most is accepted, and on a CPU every "
            "token that is verified costs: guesses are chains, use 1"
        )
    if algorithm.on_host and settled["overlap_depth"]:
        yield (
            f"{asked('overlap_depth')} and {asked('speculative_algorithm')}: guesses continue the last token, which "
            "the host does not know while its step is in flight: use --overlap-depth 0"
        )
    if algorithm in _WITH_DRAFT and "speculative_draft_model_path" not in settled:
        yield f"{asked('speculative_algorithm')}: name the model that guesses with --speculative-draft-model-path"
    if algorithm not in _MAY_HAVE_DRAFT and "speculative_draft_model_path" in settled:
        yield (
            f"{asked('speculative_draft_model_path')} and {asked('speculative_algorithm')}: a draft model is for "
            f"{', '.join(_MAY_HAVE_DRAFT)}"
        )


def field_values(settled: Settled, *, auto: bool) -> dict[str, Any]:
    """Return the field values of `SpeculationOptions`; `auto`: the algorithm was not given."""
    values = {flag.name.removeprefix(PREFIX): settled[flag.name] for flag in FLAGS if flag.name in settled}
    algorithm = algorithm_of(settled)
    return {**values, "algorithm": algorithm, "adaptive": auto and algorithm is not SpeculativeAlgorithm.OFF}
