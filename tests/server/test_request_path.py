"""How far a streamed chat goes through the server process: functions and files, which may only become fewer.

`python scripts/trace_request.py` prints the path.
"""

from __future__ import annotations

import pytest

from forebay.text.tokenizer import Tokenizer
from scripts.trace_request import CHAT, TracedThreads, trace_chat

# Requests are read around offers of an upgrade (17), and take turns at the work before admission (20, decision 64). The
# engine's client is composed of a link, mailboxes and questions (10).
MOST_FUNCTIONS, MOST_FILES = 231, 41
ONCE = (
    "SamplingParams.check",
    "SamplingParams.check_values",
    "check_context",
    "check_counts",
    "check_answerable",
    "ChatRequest._check_chat",
    "ChatRequest.offered_tools",
    "ChatRequest.wanted",
    "Sampling._check_together",
    "Sampling.choices",
    "Strict.parse",
    "Structured.grammars",
    "Templated.requested_thinking",
    "ServerContext.check_model",
    "parse_json_object",
    "RequestedParams.of",
)


BODY = {**CHAT, "reasoning_effort": "none"}


@pytest.fixture(scope="module")
def traced(tokenizer, patience) -> TracedThreads:
    return trace_chat(tokenizer, BODY)


def test_chat_path_stays_within_its_functions_and_files(traced: TracedThreads, tokenizer: Tokenizer) -> None:
    path = "\n".join(str(call) for trace in traced.traces.values() for call in trace.calls)
    functions, traces = traced.functions, 1
    while len(functions) > MOST_FUNCTIONS and traces < 4:  # a timer that goes off during one trace is not in all
        functions, traces = functions & trace_chat(tokenizer, BODY).functions, traces + 1
    assert len(functions) <= MOST_FUNCTIONS, path
    assert len({file for file, _ in functions}) <= MOST_FILES, path


@pytest.mark.whole
@pytest.mark.parametrize("check", ONCE)
def test_chat_path_runs_each_check_once(traced: TracedThreads, check: str) -> None:
    assert traced.calls[check] == 1
