"""Coding agents on the command line: how each is set up against a server, and how its tools are called."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Final

from forebay.server.api.openai.responses_items import SUMMARY_PROMPT
from tests.deadlines import HANGS_S
from tests.integration.clients.install import installed
from tests.integration.clients.model import NO_ASIDES, Turn
from tests.text.answers.spellings import Answer

ASKED: Final = "Do the ten steps."
WRITTEN: Final = 'x = "ä\\n"\n\t<b>&amp;</b>\n'
CHECKPOINT: Final = "CONTEXT CHECKPOINT COMPACTION"  # in Codex's own prompt for a summary
LIMIT_S: Final = 2 * HANGS_S
Call = tuple[str, str]


def call(name: str, **arguments: Any) -> Call:
    """Return a call as a model's answer has it: the name and the JSON of the arguments."""
    return name, json.dumps(arguments, ensure_ascii=False)


class CodingAgent(ABC):
    """A client in a folder of its own, with two files to read.

    `route` is what it posts to, `asides` are texts of its prompts that are no turns (see `ScriptedModel`), and
    `complaints` are words of its log for a retry or for something that it could not read.
    """

    group: ClassVar[str] = "node"
    route: str
    asides: ClassVar[Mapping[str, str]] = NO_ASIDES
    complaints: ClassVar[tuple[str, ...]] = ()

    def __init__(self, folder: Path) -> None:
        self.installed = installed(self.group)
        self.home, self.work = folder / "home", folder / "work"
        for path in (self.home, self.work):
            path.mkdir(parents=True)
        (self.work / "step-1.txt").write_text("alpha\n")
        (self.work / "b.txt").write_text("beta\n")
        self.log = ""

    @abstractmethod
    def set_up(self, url: str) -> dict[str, str]:
        """Write the client's configuration, and return the variables of its environment."""

    @abstractmethod
    def command(self, *, again: bool) -> list[str]:
        """Return the command line that asks for the steps; with `again` in the conversation before."""

    @abstractmethod
    def shell(self, command: str) -> Call:
        """Return the call that runs a command."""

    @abstractmethod
    def read(self, name: str) -> Call:
        """Return the call that reads a file."""

    @abstractmethod
    def write(self, name: str, text: str) -> Call:
        """Return the call that writes a file."""

    def program(self, name: str) -> str:
        """Return the path of an installed program."""
        return str(self.installed / "node_modules" / ".bin" / name)

    def run(self, url: str, *, again: bool = False) -> int:
        """Run the client once and return its exit code. Nothing of this process's environment reaches it."""
        (self.home / "tmp").mkdir(exist_ok=True)
        places = f"{self.installed / 'node_modules' / '.bin'}:{os.environ['PATH']}"
        shared = {"PATH": places, "HOME": str(self.home), "TMPDIR": str(self.home / "tmp"), "LANG": "C.UTF-8"}
        variables = {**shared, "TERM": "dumb", **self.set_up(url)}
        done = subprocess.run(
            self.command(again=again), cwd=self.work, env=variables, input="", capture_output=True, text=True,
            timeout=LIMIT_S, check=False,
        )  # fmt: skip
        self.log = f"{done.stdout}\n{done.stderr}"
        return done.returncode

    def complained(self) -> list[str]:
        """Return the lines of the client's log that tell of a retry or of an error."""
        return [line for line in self.log.splitlines() if any(word in line for word in self.complaints)]

    def steps(self) -> list[Turn]:
        """Return ten turns: calls alone, beside text, several at once, one that fails, and thinking between calls."""
        shell = self.shell
        return [
            (Answer("", "First I look.", (shell("echo step-0"),)),),
            (Answer("Both files.", "Two of them.", (self.read("step-1.txt"), self.read("b.txt"))),),
            (Answer("", "Now I write.", (self.write("step-2.txt", WRITTEN),)),),
            (Answer("", "", (shell("echo step-3 'a \"b\"' && ls"), shell("echo again"), shell("false"))),),
            (
                Answer("", "One.", (shell("echo step-4"),)),
                Answer("", "And one more.", (shell("printf 'a\\tb\\n'"),)),
            ),
            *((Answer("", "Next.", (shell(f"echo step-{i}"),)),) for i in range(5, 8)),
            (Answer("One more.", "", (shell("echo step-8"),)),),
            (Answer("All done, step-9.", "Nothing is left."),),
        ]


class ClaudeCode(CodingAgent):
    route = "/v1/messages"
    complaints = ("api_retry", '"is_error":true,"api_error', "API Error", "InputValidationError", "could not be parsed")

    def set_up(self, url: str) -> dict[str, str]:
        return {
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_AUTH_TOKEN": "none",
            "ANTHROPIC_MODEL": "tiny",
            "ANTHROPIC_SMALL_FAST_MODEL": "tiny",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "4000",
            "DISABLE_AUTOUPDATER": "1",
            "IS_SANDBOX": "1",
        }

    def command(self, *, again: bool) -> list[str]:
        options = ["--output-format", "stream-json", "--verbose", "--dangerously-skip-permissions"]
        return [self.program("claude"), "-p", ASKED, *options, *(["--continue"] if again else [])]

    def shell(self, command: str) -> Call:
        return call("Bash", command=command, description="A step")

    def read(self, name: str) -> Call:
        return call("Read", file_path=str(self.work / name))

    def write(self, name: str, text: str) -> Call:
        return call("Write", file_path=str(self.work / name), content=text)


class Codex(CodingAgent):
    """Codex has tools of an MCP server beside its shell, which it sends in a namespace.

    It lets a provider with the name OpenAI compact a conversation, and asks the model of another one for a summary.
    """

    route = "/v1/responses"
    complaints = (
        "stream disconnected",
        "Reconnecting",
        "unsupported call",
        "failed to parse",
        "Turn error",
    )
    asides = MappingProxyType(dict.fromkeys((CHECKPOINT, SUMMARY_PROMPT.partition("\n")[0]), "Done: {done}."))
    provider = "Forebay"
    settings: tuple[str, ...] = ()

    def set_up(self, url: str) -> dict[str, str]:
        lines = [
            *('model = "tiny"', 'model_provider = "forebay"', 'approval_policy = "never"', *self.settings),
            *('sandbox_mode = "danger-full-access"', "[model_providers.forebay]", f'name = "{self.provider}"'),
            *(f'base_url = "{url}/v1"', 'wire_api = "responses"', "[mcp_servers.calc]"),
            *(f'command = "{sys.executable}"', f'args = ["{Path(__file__).with_name("mcp_server.py")}"]'),
        ]
        (self.home / ".codex").mkdir(exist_ok=True)
        (self.home / ".codex" / "config.toml").write_text("\n".join(lines))
        return {"RUST_LOG": "info"}

    def command(self, *, again: bool) -> list[str]:
        options = ["--json", "--skip-git-repo-check"]
        return [self.program("codex"), "exec", *(["resume", "--last"] if again else []), *options, ASKED]

    def shell(self, command: str) -> Call:
        return call("exec_command", cmd=command)

    def read(self, name: str) -> Call:
        return call("mcp__calc__echo", text=f"{name}: {(self.work / name).read_text()}")

    def write(self, name: str, text: str) -> Call:
        return call("exec_command", cmd=f"cat > {name} <<'END'\n{text}END")


class OpenCode(CodingAgent):
    asides = MappingProxyType({"You are a title generator": "A short title"})
    complaints = ("level=ERROR", "retry", "AI_")
    package: ClassVar[str]

    def set_up(self, url: str) -> dict[str, str]:
        model = {"name": "tiny", "reasoning": True, "tool_call": True, "limit": {"context": 500_000, "output": 4000}}
        options = {"baseURL": f"{url}/v1", "apiKey": "none"}
        provider = {"npm": self.package, "name": "Forebay", "options": options, "models": {"tiny": model}}
        config = {
            "model": "forebay/tiny",
            "small_model": "forebay/tiny",
            "permission": "allow",
            "autoupdate": False,
            "share": "disabled",
            "provider": {"forebay": provider},
        }
        (self.work / "opencode.json").write_text(json.dumps(config))
        return {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"}

    def command(self, *, again: bool) -> list[str]:
        options = ["--format", "json", "--print-logs", "--log-level", "INFO", "-m", "forebay/tiny"]
        return [self.program("opencode"), "run", *options, *(["--continue"] if again else []), ASKED]

    def shell(self, command: str) -> Call:
        return call("bash", command=command, description="A step")

    def read(self, name: str) -> Call:
        return call("read", filePath=str(self.work / name))

    def write(self, name: str, text: str) -> Call:
        return call("write", filePath=str(self.work / name), content=text)


class OpenCodeChat(OpenCode):
    route = "/v1/chat/completions"
    package = "@ai-sdk/openai-compatible"


class OpenCodeMessages(OpenCode):
    route = "/v1/messages"
    package = "@ai-sdk/anthropic"


class OpenCodeResponses(OpenCode):
    route = "/v1/responses"
    package = "@ai-sdk/openai"


AGENTS: Final[dict[str, type[CodingAgent]]] = {
    "claude-code": ClaudeCode,
    "codex": Codex,
    "opencode-chat": OpenCodeChat,
    "opencode-messages": OpenCodeMessages,
    "opencode-responses": OpenCodeResponses,
}
