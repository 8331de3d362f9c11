"""What other engines call things, and what is said here of what there is not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from forebay.base import foreign
from forebay.cli import commands as cli
from forebay.config.server_args import FLAGS
from forebay.server.api.fields_by_route import BODIES
from forebay.server.api.fields_by_route import rows as fields_by_route_rows
from scripts.site.tables import code, codes, table


def aliases() -> str:
    """Options that are taken under their names there."""
    rows = [(code(alias), code(flag.option), flag.group) for flag in FLAGS for alias in flag.aliases]
    return table(("there", "here", "about"), sorted(rows, key=lambda row: row[0].strip("`-").lower()))


def accepted_flags() -> str:
    """Options that change nothing here, each with the line of its note."""
    lines = {_spelled(accepted): accepted.line for accepted in foreign.ACCEPTED_OPTIONS.values()}
    return table(("option", "why it changes nothing"), _by_line(lines))


def _spelled(accepted: foreign.Accepted) -> str:
    """The option with the values that are accepted, if not all are."""
    return f"{accepted.option} {','.join(accepted.values)}" if accepted.values else accepted.option


def absent_flags() -> str:
    """Options and values, each with the line that the command line says."""
    tables = [
        table(("option", "what is said"), _by_line(foreign.ABSENT_OPTIONS)),
        *(
            f"Values of `{flag.option}`:\n\n{table(('value', 'what is said'), _by_line(flag.absent))}"
            for flag in FLAGS
            if flag.absent
        ),
    ]
    return "\n\n".join(tables)


def fields() -> str:
    passed = f"These cannot change an answer, and pass: {codes(sorted(foreign.PASSED))}."
    lines = table(("field", "what is said"), _by_line({**foreign.ABSENT_FIELDS, **foreign.OTHER_ROUTES}))
    return f"{passed}\n\n{lines}"


def fields_by_route() -> str:
    rows = [(code(name), *(each.value for each in fates.values())) for name, fates in fields_by_route_rows()]
    return table(("field", *map(code, BODIES)), rows)


def commands() -> str:
    rows = [(code(theirs), code(f"forebay {ours}")) for theirs, ours in cli._ELSEWHERE.items()]
    return table(("there", "here"), rows)


def _by_line(lines: Mapping[str, str]) -> list[tuple[str, str]]:
    names = defaultdict(list)
    for name, line in lines.items():
        names[line].append(name)
    return [(codes(group), line) for line, group in names.items()]
