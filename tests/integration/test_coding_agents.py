"""Coding agents of today against the server, with a model that answers as large ones do: `make clients`.

Ten turns, three tools, several calls at once, a call that fails, thinking between calls, and a call that is cut off.
"""

from __future__ import annotations

import os
import re
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from tests.integration.clients.command_line import AGENTS, LIMIT_S, WRITTEN, Codex, CodingAgent
from tests.integration.clients.install import installed
from tests.integration.clients.model import FAMILIES, Turn, scripted
from tests.integration.clients.recorder import Recorder, recorded
from tests.text.answers.spellings import Answer

pytestmark = [pytest.mark.clients, pytest.mark.slow]


BEGUN = 40  # characters with which a template begins an answer, and which it may not repeat: an empty thought, say


def check_exchanges(recorder: Recorder, agent: CodingAgent, prompts: list[str], num_turns: int) -> None:
    """Nothing was refused and nothing asked twice, and each prompt goes on from the one before it."""
    assert recorder.refused() == []
    bodies = [exchange.body for exchange in recorder.posts(agent.route)]
    assert len(set(bodies)) == len(bodies)
    assert len(prompts) == num_turns
    pairs = enumerate(pairwise(prompts))
    changed = [i for i, (one, other) in pairs if not other.startswith(one[: len(one) - BEGUN])]
    assert changed == [], "prompts that do not go on from the one before"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", AGENTS)
def test_agent_does_ten_steps_without_a_retry(name: str, family: str, tmp_path: Path) -> None:
    agent = AGENTS[name](tmp_path)
    steps = agent.steps()
    with scripted(family, steps, agent.asides) as model, recorded(model.server.url) as recorder:
        code = agent.run(recorder.url)
        check_exchanges(recorder, agent, model.prompts, len(steps))
    assert code == 0, agent.log[-4000:]
    assert agent.complained() == []
    assert "All done, step-9." in agent.log
    assert (agent.work / "step-2.txt").read_text() == WRITTEN
    missing = [text for text in ("alpha", "beta", "step-3", "again", "step-7") if text not in model.prompts[-1]]
    assert missing == []
    if name == "codex":
        assert re.findall(r"sampling_retry_count=(\d+)", agent.log)[-1] == "0"


LONG = "y" * 20_000


def cut_off_steps(agent: CodingAgent) -> list[Turn]:
    return [
        (Answer("", "Hm.", (agent.shell("echo step-0"),)),),
        (Answer("Now.", "Long.", (agent.write("step-1.txt", LONG),)),),
        (Answer("", "", (agent.shell("echo step-2"),)),),
        (Answer("All done, step-3.", "So."),),
    ]


@pytest.mark.parametrize("name", [name for name in AGENTS if name != "codex"])
def test_agent_goes_on_after_a_call_that_is_cut_off(name: str, tmp_path: Path) -> None:
    """The client limits an answer to 4000 tokens. It tells the model that the call cannot be read."""
    agent = AGENTS[name](tmp_path)
    steps = cut_off_steps(agent)
    with scripted("qwen3", steps, agent.asides) as model, recorded(model.server.url) as recorder:
        code = agent.run(recorder.url)
        check_exchanges(recorder, agent, model.prompts[:2], 2)
    assert (code, len(model.prompts)) == (0, len(steps)), agent.log[-4000:]
    assert "All done, step-3." in agent.log
    assert (agent.work / "step-1.txt").read_text() == "alpha\n"


def test_codex_resumes_after_a_call_that_is_cut_off(tmp_path: Path) -> None:
    """Codex ends its turn if a response is incomplete. The conversation goes on with the next one."""
    agent = Codex(tmp_path)
    steps = cut_off_steps(agent)
    with scripted("qwen3", steps) as model:
        first = scripted("qwen3", steps, context=52_000)
        with first as small, recorded(small.server.url) as recorder:
            assert agent.run(recorder.url) == 1
            assert recorder.refused() == []
            assert len(small.prompts) == 2
        assert "Incomplete response returned, reason: max_output_tokens" in agent.log
        with recorded(model.server.url) as recorder:
            assert agent.run(recorder.url, again=True) == 0, agent.log[-4000:]
            assert recorder.refused() == []
    assert "All done, step-3." in agent.log


@pytest.mark.parametrize("provider", ["Forebay", "OpenAI"])
def test_codex_goes_on_after_it_has_compacted_its_conversation(provider: str, tmp_path: Path) -> None:
    """The server compacts for a provider with the name OpenAI; otherwise Codex asks the model for a summary."""
    agent = Codex(tmp_path)
    agent.provider, agent.settings = provider, ("model_auto_compact_token_limit = 42500",)
    steps = agent.steps()
    with scripted("qwen3", steps, agent.asides) as model, recorded(model.server.url) as recorder:
        assert agent.run(recorder.url) == 0, agent.log[-4000:]
        assert recorder.refused() == []
        kinds = [[item["type"] for item in exchange.json["input"]] for exchange in recorder.posts(agent.route)]
    assert agent.complained() == []
    assert "All done, step-9." in agent.log
    assert len(model.prompts) == len(steps)
    assert len(kinds) == len(steps) + 1
    assert any("compaction_trigger" in items for items in kinds) == (provider == "OpenAI")
    assert ("compaction" in kinds[-1]) == (provider == "OpenAI")
    assert "Done: step-0, step-1" in model.prompts[-1]
    assert "First I look." not in model.prompts[-1]


def edit(number: int) -> str:
    """Return an answer of a model that edits a file for aider, which has no tools but a form of its own."""
    change = f'<<<<<<< SEARCH\nline\n=======\nline\n"{number}" <ä>\n>>>>>>> REPLACE\n'
    return f"Edit step-{number}.\n\na.txt\n```\n{change}```\n"


@pytest.mark.parametrize("stream", ["--stream", "--no-stream"])
@pytest.mark.parametrize(("model_name", "base"), [("openai", "OPENAI_API_BASE"), ("anthropic", "ANTHROPIC_API_BASE")])
def test_aider_applies_nine_edits(model_name: str, base: str, stream: str, tmp_path: Path) -> None:
    program = installed("aider") / "bin" / "aider"
    (tmp_path / "a.txt").write_text("line\n")
    steps: list[Turn] = [(Answer(edit(number), "Let me see."),) for number in range(9)]
    options = "--edit-format diff --yes-always --no-check-update --no-show-model-warnings --no-analytics --no-git"
    more = "--no-pretty --no-fancy-input --no-detect-urls --map-tokens 0"
    argv = [program, "--model", f"{model_name}/tiny", stream, *options.split(), *more.split(), "a.txt"]
    with (
        scripted("qwen3", [*steps, (Answer("All done, step-9."),)]) as model,
        recorded(model.server.url) as recorder,
    ):
        url = recorder.url + ("/v1" if model_name == "openai" else "")
        key = base.replace("BASE", "KEY")
        places = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "TERM": "dumb"}
        done = subprocess.run(
            argv, cwd=tmp_path, env={**places, base: url, key: "none", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
            input="Go on.\n" * 10, capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
        assert recorder.refused() == []
        assert len(recorder.exchanges) == len(model.prompts) == 10
    assert "All done, step-9." in done.stdout
    assert "retry" not in done.stdout.lower()
    assert (tmp_path / "a.txt").read_text() == "line\n" + "".join(f'"{number}" <ä>\n' for number in reversed(range(9)))
