"""A pair of servers under faults for as long as one likes: right tokens or one typed error, and nothing left behind.

python -m tests.integration.test_pd_soak --minutes 2
"""

from __future__ import annotations

import argparse
import random
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.deadlines import wait_until
from tests.integration.test_disaggregation import LONG, SOON, Servers, started

CHAOS = "--chaos=drop=0.1%,double=0.1%,reorder=0.1%,alter=0.1%,delay=5ms,kill-prefill=40s,kill-decode=60s"
CLIENTS = 4
MINUTES = 30.0
TYPED = range(500, 505)  # what a client may be told of a server that has gone


def bodies(rng: random.Random) -> list[dict[str, Any]]:
    """Of many lengths, so that faults meet every state of a request."""
    prompts = ["The capital of France is", "Once upon a time", LONG, LONG[:700], "def f(x):", LONG[200:] + LONG]
    sampled = {"temperature": 1.0, "seed": 5}
    return [
        {"prompt": prompt, "max_tokens": rng.choice((1, 8, 40)), **how} for prompt in prompts for how in ({}, sampled)
    ]


def soak(seconds: float) -> Counter[str]:
    """What became of requests, by kind. Raises where a token is wrong, or an error is not typed."""
    rng = random.Random(7)
    asked = bodies(rng)
    with started() as alone:
        expected = [alone.complete(**body).json()["choices"] for body in asked]
    found: Counter[str] = Counter()
    wrong: list[str] = []
    with started("--pd=local", CHAOS, *SOON) as pair:
        end = time.monotonic() + seconds
        clients = [
            threading.Thread(target=client, args=(pair, asked, expected, end, number, found, wrong))
            for number in range(CLIENTS)
        ]
        for each in clients:
            each.start()
        for each in clients:
            each.join()
        wait_until(lambda: pair.is_ready and pair.at_rest())
    assert not wrong, wrong[:3]
    return found


def client(
    pair: Servers, asked: Any, expected: Any, end: float, number: int, found: Counter[str], wrong: list[str]
) -> None:
    rng = random.Random(number)
    while time.monotonic() < end and not wrong:
        which = rng.randrange(len(asked))
        answer = pair.complete(**asked[which])
        told = answer.json()
        if answer.status_code == 200:
            found["right"] += 1
            if told["choices"] != expected[which]:
                wrong.append(f"{asked[which]} gave {told['choices']}, not {expected[which]}")
        elif answer.status_code in TYPED and told["error"]["code"]:
            found[told["error"]["code"]] += 1
            time.sleep(0.2)
        else:
            wrong.append(answer.text)


@pytest.mark.slow
def test_c22_under_faults_tokens_are_right_or_errors_typed_and_in_the_end_nothing_is_held(embedded_model: Path) -> None:
    found = soak(60 * MINUTES)
    assert found["right"] > 10 * MINUTES, found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0)
    print(dict(soak(60 * parser.parse_args().minutes)))
