"""How often n-gram guesses are right, and what that is worth, by what the longest match of all would be.

    python benchmarks/ngram.py                   # a minute: the default model writes, and this project's edits are read
    python benchmarks/ngram.py --widths 4 8 16 --token-cost 0.067

Streams are what the default model answers (chat; the same with temperature; quoting; code), and files of this project
after a commit with the file before it as the prompt (edits). A step that verifies w tokens counts as 1 + (w - 1) x
token cost of one that verifies none; gain is tokens by cost. `longest` looks for the longest suffix that stood before,
up to the depth, at the latest place; `NGRAM` is what is served, once in a namespace of its own and once in one that has
seen the streams before it.
"""

from __future__ import annotations

import argparse
import subprocess
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.table import Table

from forebay.config.engine_config import SpeculationOptions
from forebay.engine.client.llm import LLM
from forebay.requests.request import Request
from forebay.requests.sampling_params import SamplingParams
from forebay.speculation.ngram import Ngram

ROOT = Path(__file__).parent.parent
DEPTH = SpeculationOptions().ngram_max_trie_depth
QUESTIONS = (
    *(
        "What is a black hole?",
        "How does photosynthesis work?",
        "Why is the sky blue?",
        "How does a refrigerator work?",
    ),
    *("Write a short story about a lighthouse keeper.", "Write a poem about autumn.", "Describe a healthy breakfast."),
    *("What is the difference between TCP and UDP?", "List ten countries in Africa with their capitals."),
    *("Give me a recipe for tomato soup.", "What are three tips to sleep better?", "Explain recursion to a child."),
)
Stream = tuple[list[int], list[int]]  # prompt and output


class Proposer(Protocol):
    def begin_step(self, num_requests: int) -> None: ...

    def propose(self, req: Request, most: int) -> Sequence[int]: ...

    def ended(self, req: Request) -> None: ...


class Longest:
    """The latest place of the longest suffix that stood before: an index for each length."""

    def __init__(self) -> None:
        self._behind: list[dict[bytes, int]] = [{} for _ in range(DEPTH + 1)]
        self._num_read = self._place = self._length = 0

    def begin_step(self, num_requests: int) -> None:
        pass

    def propose(self, req: Request, most: int) -> Sequence[int]:
        for end in range(self._num_read + 1, len(req.tokens) + 1):
            self._length = 0
            for length in range(1, min(DEPTH, end) + 1):
                index, key = self._behind[length], req.tokens[end - length : end].tobytes()
                if key in index:
                    self._length, self._place = length, index[key]
                index[key] = end
        self._num_read = len(req.tokens)
        count = min(self._length, most)
        return (req.tokens[self._place :] * count)[:count]

    def ended(self, req: Request) -> None:
        self.__init__()  # type: ignore[misc]


def written(llm: LLM, num_tokens: int) -> Iterator[tuple[str, list[Stream]]]:
    prose = [text.strip() for text in (ROOT / "benchmarks/data/prose.txt").read_text().split("\n\n") if len(text) > 300]
    files = [path.read_text()[:2200] for path in sorted((ROOT / "forebay/base").glob("*.py"))[:8]]
    quoting = [f"Repeat the following text exactly, word for word:\n\n{text}" for text in prose[:8]]
    coding = [f"Add a comment to each function of this file:\n```python\n{text}\n```" for text in files]
    asked = (("chat", QUESTIONS, 0.0), ("chat, temperature 0.7", QUESTIONS, 0.7), ("quoting", quoting, 0.0))
    for kind, prompts, temperature in (*asked, ("code", coding, 0.0)):
        params = SamplingParams(max_tokens=num_tokens, temperature=temperature, seed=0)
        outputs = llm.chat([[{"role": "user", "content": text}] for text in prompts], params)
        yield kind, [(output.prompt_token_ids, output.token_ids) for output in outputs]


def edits(llm: LLM, most: int = 20) -> Iterator[Stream]:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout

    found = 0
    for commit in git("log", "--format=%H", "-n", "60", "--no-merges").split():
        names = git("diff", "--name-only", "--diff-filter=M", f"{commit}^", commit, "--", "forebay/*.py").split()
        for name in names[:2]:
            before, after = (llm.tokenizer.encode(git("show", f"{at}:{name}")) for at in (f"{commit}^", commit))
            if found < most and len(after) < 3000:
                found += 1
                yield before, after


def play(stream: Stream, proposer: Proposer, width: int, number: int) -> array[int]:
    """A stream's tokens, steps, guesses, and those that were right."""
    prompt, output = stream
    req = Request(number, prompt, SamplingParams(max_tokens=len(output)))
    req.tokens.append(output[0])
    place, steps, guessed, right = 1, 0, 0, 0
    while place < len(output):
        proposer.begin_step(1)
        guesses = proposer.propose(req, min(width - 1, len(output) - place - 1)) if place < len(output) - 1 else ()
        accepted = next((i for i, token in enumerate(guesses) if token != output[place + i]), len(guesses))
        req.tokens.extend(output[place : place + accepted + 1])
        place, steps, guessed, right = place + accepted + 1, steps + 1, guessed + len(guesses), right + accepted
    proposer.ended(req)
    return array("q", (place - 1, steps, guessed, right))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--token-cost", type=float, default=0.067, help="of a guess, in steps")
    parser.add_argument("--num-tokens", type=int, default=256, help="of each answer")
    args = parser.parse_args()
    llm = LLM(context_length=4096, max_running_requests=16)
    streams = dict(written(llm, args.num_tokens)) | {"edits": list(edits(llm))}
    table = Table("streams", "width", "guesses", "tokens a step", "right", "gain", box=None)
    for kind, of_kind in streams.items():
        for width in args.widths:
            for name in ("longest", "NGRAM", "NGRAM, shared"):
                proposer: Proposer = Longest() if name == "longest" else Ngram(SpeculationOptions())
                sums = [0, 0, 0, 0]
                for number, stream in enumerate(of_kind):
                    if name == "NGRAM":
                        proposer = Ngram(SpeculationOptions())
                    sums = [a + b for a, b in zip(sums, play(stream, proposer, width, number), strict=True)]
                tokens, steps, guessed, right = sums
                gain = tokens / (steps + guessed * args.token_cost)
                row = (f"{tokens / steps:.2f}", f"{right / max(1, guessed):.0%}", f"{gain:.2f}")
                table.add_row(kind, str(width), name, *row)
    Console().print(table)


if __name__ == "__main__":
    main()
