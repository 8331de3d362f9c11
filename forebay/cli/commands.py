"""`forebay`: the subcommands, each imported only when it is asked for.

Exit codes: 0 done, 1 it failed while running, 2 the command line, configuration or checkpoint cannot work, 130 Ctrl-C.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Final

from forebay.base.errors import ConfigError, ForebayError, ModelError
from forebay.base.exit_codes import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_REFUSED
from forebay.base.package import __version__
from forebay.base.relay import relaying
from forebay.base.streams import give_up_stdout, open_standard_streams

COMMANDS: Final = {
    "serve": ("forebay.cli.serve", "serve a model over HTTP (OpenAI's API, and a page at /)"),
    "route": ("forebay.cli.route", "one endpoint before several servers"),
    "cluster": ("forebay.cluster.commands", "servers on a Ray cluster: up, status, scale, update, logs, down"),
    "pd": ("forebay.cli.pd", "check that a prefill and a decode server fit, and how fast caches go"),
    "chat": ("forebay.cli.chat", "talk to a model in the terminal"),
    "generate": ("forebay.cli.generate", "complete one prompt to standard output"),
    "bench": ("forebay.cli.bench", "measure: serve, throughput, latency"),
    "plan": ("forebay.cli.plan", "say what a model would need and how many requests would fit"),
    "verify": ("forebay.cli.verify", "prove that nothing around a request changes its tokens, here"),
    "replay": ("forebay.cli.replay", "decide again what a flight recorder has, plan by plan"),
    "explain": ("forebay.cli.explain", "say what became of a request, and what would have made it faster"),
    "models": ("forebay.cli.models", "list, pull and inspect models"),
    "cache": ("forebay.cli.cache", "list, verify and remove the files of a prefix cache"),
    "doctor": ("forebay.cli.doctor", "say what is wrong with this machine or install, and the fix"),
    "completion": ("forebay.cli.completion", "print what a shell completes commands with: bash, zsh, fish"),
}
_SERVERS: Final = ("serve", "route")
# What other projects' commands are called here.
_ELSEWHERE: Final = {
    "run": "chat MODEL",
    "pull": "models pull MODEL",
    "list": "models list",
    "ls": "models list",
    "ps": "models list",
    "rm": "models rm MODEL",
    "show": "models inspect MODEL",
    "complete": "generate PROMPT",
    "start": "serve",
    "launch_server": "serve",
    "api_server": "serve",
    "llama-server": "serve",
    "benchmark": "bench",
    "collect-env": "doctor",
}
_EXAMPLES: Final = """\
examples:
  forebay serve                                  the model that is embedded
  forebay serve Qwen/Qwen3-0.6B                  one of the Hugging Face hub
  forebay serve org/name-GGUF:Q4_K_M             one of its GGUF files
  forebay plan org/name --memory 16GiB           would it fit, and how many users?
  forebay chat                                   with the server that runs here
  forebay verify ./my-model                      the same tokens, whatever happens?
  echo "Once upon" | forebay generate -n 50"""

_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    open_standard_streams()
    with _log_of(words):
        return guarded(lambda: _dispatch(words))


def _log_of(words: Sequence[str]) -> contextlib.AbstractContextManager[None]:
    """Return the relay of a server whose log is JSON: from the first line on, before the settings are read."""
    if words and words[0] in _SERVERS:
        from forebay.cli.log_format import asks_for_json

        if asks_for_json(words[1:]):
            return relaying("server" if words[0] == "serve" else "router")
    return contextlib.nullcontext()


def guarded(work: Callable[[], int]) -> int:
    """Run a command and return its exit code, or that of its exception, whose message is printed."""
    open_standard_streams()
    try:
        code = work()
        sys.stdout.flush()  # here, where a full device can be reported
        return code
    except ForebayError as error:
        print(f"forebay: error: {error.message}", file=sys.stderr)
        return EXIT_REFUSED if isinstance(error, ConfigError | ModelError) else EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has left; the interpreter must not try to flush the rest at exit.
        give_up_stdout()
        return EXIT_FAILED
    except OSError as error:
        if error.errno not in _FULL:
            raise
        give_up_stdout()
        name = error.filename or "the standard output or a file"
        print(f"forebay: error: {error.strerror}: {name} could not be written: free some space", file=sys.stderr)
        return EXIT_FAILED


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_usage())
        return EXIT_OK if words else EXIT_REFUSED
    if words[0] in ("-V", "-v", "--version", "version"):
        print(f"forebay {__version__}")
        return EXIT_OK
    if words[0] not in COMMANDS:
        if ours := _ELSEWHERE.get(words[0]):
            raise ConfigError(f"there is no command {words[0]!r}: it is `forebay {ours}` here")
        from forebay.config.sources import did_you_mean

        raise ConfigError(f"there is no command {words[0]!r}{did_you_mean(words[0], COMMANDS)}")
    module = importlib.import_module(COMMANDS[words[0]][0])
    result: int = module.run(words[1:])
    return result


def _usage() -> str:
    lines = [f"  {name:<10} {summary}" for name, (_, summary) in COMMANDS.items()]
    return "\n".join(
        [
            f"forebay {__version__}: an LLM serving engine whose memory can be trusted",
            "",
            "usage: forebay COMMAND [options]",
            "",
            *lines,
            "",
            _EXAMPLES,
            "",
            "`forebay COMMAND --help` lists the options of one, `--help=WORD` those about WORD.",
        ]
    )
