"""`forebay completion bash|zsh|fish`: what the shell completes commands and options with, from their declarations."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from forebay.base.errors import ConfigError
from forebay.cli.arguments import DESCRIBE, Described, Parser
from forebay.cli.commands import COMMANDS

_INNER: Final = {
    "bench": ("serve", "throughput", "latency"),
    "cache": ("list", "verify", "rm"),
    "cluster": ("up", "status", "scale", "update", "logs", "down"),
    "models": ("list", "pull", "rm", "inspect", "show", "make"),
    "completion": ("bash", "zsh", "fish"),
}
_BASH: Final = """\
_forebay() {
  local cur="${COMP_WORDS[COMP_CWORD]}" prev="${COMP_WORDS[COMP_CWORD-1]}" words="" values=""
  case "${COMP_WORDS[1]} ${COMP_WORDS[2]}" in
%(cases)s
  esac
  [ "$COMP_CWORD" -eq 1 ] && words="%(commands)s"
  [ "$COMP_CWORD" -eq 2 ] && case "${COMP_WORDS[1]}" in
%(inner)s
  esac
  case "$prev" in
%(values)s
  esac
  if [ -n "$values" ]; then words="$values"; elif [[ "$prev" == -* && "$cur" != -* ]]; then words=""; fi
  COMPREPLY=($(compgen -W "$words" -- "$cur"))
}
complete -o default -F _forebay forebay
"""


class Command(NamedTuple):
    """A subcommand with its options: each an option string, its allowed values and its help."""

    words: tuple[str, ...]  # `serve`, or `models pull`
    options: list[tuple[str, Sequence[str], str]]


def run(words: Sequence[str]) -> int:
    """Print the shell's completion script and return the exit code."""
    parser = Parser(
        "completion",
        "Print a script; the shell reads it when it starts.",
        "bash|zsh|fish",
        examples=("bash > ~/.local/share/bash-completion/completions/forebay", "zsh >> ~/.zshrc"),
    )
    parser.option("shell", nargs="?", help="bash, zsh or fish")
    shell = parser.parse(words).own.shell
    if shell not in _INNER["completion"]:
        raise ConfigError(f"there is no completion for {shell or 'no shell'!r}: give bash, zsh or fish")
    found = list(commands())
    print(fish(found) if shell == "fish" else ("" if shell == "bash" else _OF_ZSH) + bash(found))
    return 0


_OF_ZSH: Final = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"


def commands() -> Iterator[Command]:
    """Yield every subcommand; each module is imported and asked for its options without running."""
    for name, (module, _) in COMMANDS.items():
        inner = _INNER.get(name, ()) if name != "completion" else ()
        for words in ((name, word) for word in inner) if inner else ((name,),):
            try:
                importlib.import_module(module).run([*words[1:], DESCRIBE])
            except Described as described:
                yield Command(words, described.options)


def bash(found: Sequence[Command]) -> str:
    """Return the bash script, which zsh reads through bashcompinit as well."""
    options = {" ".join(command.words): [option for option, _, _ in command.options] for command in found}
    cases = [f'    "{name}"*) words="{" ".join(names)}" ;;' for name, names in options.items()]
    values = {option: choices for command in found for option, choices, _ in command.options if choices}
    return _BASH % {
        "cases": "\n".join(cases),
        "commands": " ".join(COMMANDS),
        "inner": "\n".join(f'    {name}) words="{" ".join(words)}" ;;' for name, words in _INNER.items()),
        "values": "\n".join(f'    {option}) values="{" ".join(choices)}" ;;' for option, choices in values.items()),
    }


def fish(found: Sequence[Command]) -> str:
    """Return the fish script."""
    lines = ["complete -c forebay -f"]
    for name, (_, summary) in COMMANDS.items():
        lines.append(f"complete -c forebay -n __fish_use_subcommand -a {name} -d {_quoted(summary)}")
    for name, words in _INNER.items():
        lines.append(f"complete -c forebay -n '__fish_seen_subcommand_from {name}' -a '{' '.join(words)}'")
    for command in found:
        seen = " && ".join(f"__fish_seen_subcommand_from {word}" for word in command.words)
        for option, choices, about in command.options:
            values = f" -x -a '{' '.join(choices)}'" if choices else ""
            name = f"-l {option[2:]}" if option.startswith("--") else f"-o {option[1:]}"
            lines.append(f"complete -c forebay -n '{seen}' {name}{values} -d {_quoted(about.partition(':')[0])}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
