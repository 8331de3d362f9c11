"""Prompts of the comparison: texts of many lengths, some of which begin alike, each with its own way of choosing
tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from forebay.base.errors import ConfigError
from forebay.requests.pictures import Picture
from forebay.requests.sampling_params import Grammar, GrammarKind, SamplingParams
from forebay.text.tokenizer import Tokenizer
from forebay.verify.texts import TEXTS

# Tokens of the longest prompt, by device. A GPU's attention adds up keys in segments of 512 and more: several of them
# are in a prompt, in a chunk of it, and in the decodes beside it.
LONGEST: Final = {"cpu": 320, "cuda": 2560}
FEWEST_WITH_DERIVED: Final = 8  # questions, beside which some are derived from answers
FEWEST_WITH_LONG: Final = 16  # questions, of which some have long answers, and others lengths at boundaries
_NUM_STOPS: Final = 4  # at consecutive places, so that one is at each place of what drafts are checked in
_NUM_GOING_ON: Final = 2 + _NUM_STOPS  # prompts that begin with one of two answers
_AROUND_PAGES: Final = (-2, -1, 0, 1)  # tokens behind the end of a page
_NUM_RESTRICTED: Final = 3  # one with a bad word, two with a least length
_LONG: Final = 4  # times as many tokens as other answers
_LONG_ANSWERS: Final = (0, 4)  # questions, both greedy
_PENALIZED: Final = 2  # a question whose likeliest tokens are penalized
_DRAWN: Final = 5  # a question whose tokens are drawn of most: hardly one comes twice in its answer
_NUM_PLACES: Final = 2  # of each prompt, from which others may go on
TOPS: Final = 4  # alternatives whose log-probabilities are compared as well
# Of a random model a JSON object is `{}`. In a long text most tokens are allowed, so that a draft can be wrong in it.
_OBJECT: Final = (
    '{"type": "object", "properties": {"text": {"type": "string", "minLength": 8192}}, "required": ["text"]}'
)
GREEDY: Final = "greedy"
# How tokens are chosen. Seeds are the question's number, so that draws are the same beside any other questions.
_WAYS: Final[tuple[tuple[str, SamplingParams], ...]] = (
    (GREEDY, SamplingParams(temperature=0.0)),
    ("temperature 0.8, top_p 0.9", SamplingParams(temperature=0.8, top_p=0.9)),
    ("greedy, penalties", SamplingParams(temperature=0.0, repetition_penalty=1.2, frequency_penalty=0.4)),
    ("temperature 1, top_k 40", SamplingParams(top_k=40)),
    (GREEDY, SamplingParams(temperature=0.0)),
    ("temperature 1.2, min_p 0.02", SamplingParams(temperature=1.2, min_p=0.02)),
    ("a JSON object", SamplingParams(temperature=0.7, grammar=Grammar(GrammarKind.JSON_SCHEMA, _OBJECT))),
    ("presence penalty, temperature 0.9", SamplingParams(temperature=0.9, presence_penalty=0.6)),
)


class Question(NamedTuple):
    """`way`: how its tokens are chosen, in words. `number` is that of the prompt, the same for each adapter. `adapter`
    is the name of the adapter to apply, "" for the model alone. The prompt has placeholders at its `pictures`.
    `resume_points` are lengths at which states and windows should be cached, as at the ends of messages. Prefixes are
    shared within a `namespace`. `is_derived` says that it is made of another's answer."""

    prompt: list[int]
    params: SamplingParams
    way: str
    number: int
    adapter: str = ""
    pictures: tuple[Picture, ...] = ()
    resume_points: tuple[int, ...] = ()
    namespace: str = ""
    is_derived: bool = False


def make_questions(
    tokenizer: Tokenizer,
    num: int,
    max_tokens: int,
    *,
    page_size: int,
    context_length: int,
    seed: int,
    device: str,
    boundaries: Sequence[int] = (),
) -> list[Question]:
    """Return `num` questions, the same for the same `seed`. None ends before it has `max_tokens` unless a grammar ends
    it. The first of each way of choosing tokens has three pages; then come lengths around the ends of pages, twice each
    of the `boundaries` (of chunks, of states), and any others, up to LONGEST. Of FEWEST_WITH_LONG questions, two
    have long answers. The prompt of _DRAWN ends soon before a page, and its answer passes the end of another. Every
    second question, but for those at the ends of pages, begins like others, up to a length of its own, of five eighths
    of the longest at most.

    Raises ConfigError if the context has no room for them.
    """
    longest = min(max(LONGEST[device], 5 * page_size), context_length - max_tokens)
    if longest < 2 * page_size:
        raise ConfigError(
            f"a context of {context_length} tokens leaves {longest} for a prompt before {max_tokens} are generated, "
            f"and some are to be longer than two pages of {page_size}: lower --max-tokens or raise --context-length"
        )
    rng = random.Random(seed)
    trunk = _text(tokenizer, rng, min(LONGEST[device] * 5 // 8, longest - 1))
    given = _given(longest, page_size, len(trunk), device, boundaries)
    questions = []
    for number in range(num):
        if number not in given or number == _DRAWN:  # the lengths of the others do not depend on those of _DRAWN
            length = (
                min(longest, 2 * page_size + rng.randint(1, page_size))
                if number < len(_WAYS)
                else rng.randint(2, longest)
            )
            most = min(length, len(trunk))
            shared = rng.randrange(page_size, most) if number % 2 and most > page_size else 0
        if number in given:
            shared, length = given[number]
        way, params = _WAYS[number % len(_WAYS)]
        is_long = num >= FEWEST_WITH_LONG and number in _LONG_ANSWERS
        most_tokens = min(_LONG * max_tokens, longest + max_tokens - length) if is_long else max_tokens
        params = msgspec.structs.replace(
            params, max_tokens=most_tokens, seed=number, ignore_eos=params.grammar is None, logprobs=TOPS
        )
        prompt = trunk[:shared] + _text(tokenizer, rng, length - shared)
        places = sorted(random.Random(f"{seed} {number}").sample(range(length), min(_NUM_PLACES, length)))
        questions.append(Question(prompt, params, way, number, resume_points=tuple(places)))
    return questions


def _given(
    longest: int, page_size: int, num_trunk: int, device: str, boundaries: Sequence[int]
) -> dict[int, tuple[int, int]]:
    """Return the questions, by number, whose lengths are not random: how many tokens each shares, and its length."""
    edges = [(0, length) for length in (longest, 1, page_size - 1 or 1, page_size, page_size + 1, 2 * page_size)]
    if device == "cuda":
        edges += [(min(num_trunk, length - 1), length) for length in (longest - 1, longest * 7 // 8)]
    at_boundaries = [(0, length) for length in sorted({2 * boundary for boundary in boundaries}) if length <= longest]
    found = {**dict(enumerate(edges, len(_WAYS))), **dict(enumerate(at_boundaries, FEWEST_WITH_LONG))}
    almost_three_pages = max(2, min(longest, 3 * page_size - _NUM_STOPS))
    return {_DRAWN: (min(num_trunk, almost_three_pages - 1, page_size), almost_three_pages), **found}


def largest(questions: Sequence[Question]) -> int:
    """Return the number of tokens of the largest prompt with its answer."""
    return max(len(question.prompt) + question.params.max_tokens for question in questions)


def num_derived(questions: Sequence[Question]) -> int:
    """Return the number of questions that `derived` will return."""
    num = _NUM_GOING_ON + _NUM_STOPS + _NUM_RESTRICTED + len(_WAYS) + len(_AROUND_PAGES)
    return num if len(questions) >= FEWEST_WITH_DERIVED else 0


def derived(questions: Sequence[Question], answers: Sequence[Sequence[int]], page_size: int) -> list[Question]:
    """Return questions made of an answer of likeliest tokens, of one whose tokens are drawn, and of one of each way.

    Of the second, four end at tokens of it, one place after another, the last of them where its last whole page ends.
    Each has a namespace of its own, in which another goes on from just before that end: it resumes at what only the
    first has left. One may end only from its last place on. Of the first, one goes on from inside it, and one is its
    whole pages; one may not end at a token where it comes, but later. One with penalties may not have two of its tokens
    behind each other. Then come prompts that go on behind a whole answer of each way, as a conversation does. The last
    of all leave the longest prompt in its second half, and end around the ends of pages. None has more tokens with its
    answer than the largest of `questions`. Fewer than FEWEST_WITH_DERIVED questions have none."""
    if not num_derived(questions):
        return []
    first, penalized, drawn = (questions[number]._replace(is_derived=True) for number in (0, _PENALIZED, _DRAWN))
    answer, of_drawn, number, most = answers[0], answers[_DRAWN], len(questions), questions[-1].params.max_tokens
    room = largest(questions)
    longest = room - min(most, _NUM_STOPS)
    found: list[Question] = []

    def add(base: Question, prompt: list[int], **restrictions: object) -> None:
        params = msgspec.structs.replace(base.params, **restrictions)
        found.append(base._replace(prompt=prompt[:longest], params=params, number=number + len(found)))

    last = _last_page_end(len(drawn.prompt), len(of_drawn), page_size)
    new_ones = [token for place, token in enumerate(of_drawn[:last]) if token not in of_drawn[:place]]
    for stop in (new_ones[-_NUM_STOPS:] * _NUM_STOPS)[:_NUM_STOPS]:
        add(drawn._replace(namespace=f"{len(found)}"), drawn.prompt, stop_token_ids=[stop])
    inside = [*first.prompt, *answer[: len(answer) // 2], *questions[1].prompt[:2]]
    pages = [*first.prompt, *answer][:longest]
    for prompt in (inside, pages[: len(pages) // page_size * page_size]):
        add(first, prompt, max_tokens=min(most, room - len(prompt[:longest])))
    middle, stop, pair = len(answer) // 2, new_ones[-1], len(answers[_PENALIZED]) // 2
    spelled = {"bad_words": [tuple(answers[_PENALIZED][pair : pair + 2])]}
    not_yet = {"stop_token_ids": [answer[middle]], "min_tokens": min(middle + _NUM_STOPS, first.params.max_tokens)}
    from_now_on = {"stop_token_ids": [stop], "min_tokens": list(of_drawn).index(stop)}
    for base, way, restricted in (
        (penalized, f"{penalized.way}, a bad word", spelled),
        (first, "greedy, a least length", not_yet),
        (drawn, f"{drawn.way}, a least length", from_now_on),
    ):
        add(base._replace(way=way), base.prompt, **restricted)
    few, more = min(most, _NUM_STOPS), questions[1].prompt[:2]
    for ending in found[:_NUM_STOPS]:
        before = [*drawn.prompt, *of_drawn[: last - 1]]
        add(drawn._replace(namespace=ending.namespace), before, max_tokens=few)
    for base, said in zip(questions[: len(_WAYS)], answers, strict=False):
        add(base._replace(is_derived=True), [*base.prompt, *said, *more], max_tokens=few)
    base = max(questions, key=lambda question: len(question.prompt))._replace(is_derived=True)
    num_pages = len(base.prompt) // page_size
    for at, behind in enumerate(_AROUND_PAGES, len(_AROUND_PAGES)):
        stop = max(len(more), num_pages * at // (2 * len(_AROUND_PAGES)) * page_size + behind)
        add(base, [*base.prompt[: stop - len(more)], *more], max_tokens=few)
    return found


def broken_rule(question: Question, tokens: Sequence[int]) -> str:
    """Return which restriction of the question an answer breaks, in words, "" for none: an answer that breaks one alone
    and everywhere is the same in all circumstances."""
    params = question.params
    ends = [place for place, token in enumerate(tokens) if token in params.stop_token_ids]
    if ends and ends[0] < params.min_tokens:
        return f"token {tokens[ends[0]]} ends it after {ends[0]} tokens, and may not before {params.min_tokens}"
    if ends and ends[0] < len(tokens) - 1:
        return f"it has tokens behind token {tokens[ends[0]]}, which ends it"
    for word in params.bad_words:
        if any(tuple(tokens[place : place + len(word)]) == word for place in range(len(tokens))):
            return f"it has the bad word {word}"
    return ""


def _last_page_end(num_prompt: int, num_answer: int, page_size: int) -> int:
    """Return the number of tokens of an answer up to the end of its last whole page; all of them if no page ends."""
    length = (num_prompt + num_answer - 1) // page_size * page_size - num_prompt
    return length if length > 0 else num_answer


def _text(tokenizer: Tokenizer, rng: random.Random, num_tokens: int) -> list[int]:
    ids: list[int] = []
    while len(ids) < num_tokens:
        ids += tokenizer.encode(rng.choice(TEXTS), add_special_tokens=False)
    return ids[:num_tokens]
