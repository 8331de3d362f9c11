"""OpenAI's fields that this server does nothing with: they pass with a value that changes nothing in the answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from forebay.server.protocol.validation import INVALID_VALUE, UNSUPPORTED_FIELD, refusal

MAX_METADATA_KEY: Final = 64
MAX_METADATA: Final = 16
MAX_LABEL: Final = 512


class Harmless(NamedTuple):
    """Which values of a field change nothing, and their JSON schema. `wanted` says what they look like where the field
    itself is served."""

    accepts: Callable[[Any], bool]
    schema: dict[str, Any]
    wanted: str = ""

    def check(self, name: str, value: Any) -> None:
        """Raise a refusal of field `name` if `value` would have to change the answer."""
        if self.accepts(value):
            return
        if self.wanted:
            raise refusal(INVALID_VALUE, name, f"{name} must be {self.wanted}")
        raise refusal(UNSUPPORTED_FIELD, name, f"{name} is not supported by this server: leave it out")


def one_of(*values: Any) -> Harmless:
    """Accept these values alone; a bool and a number that equal each other are different values."""
    return Harmless(
        lambda value: any(value is v or (type(value) is type(v) and value == v) for v in values),
        {"enum": list(values)},
    )


def _is_metadata(value: Any) -> bool:
    if not isinstance(value, dict):
        return value is None
    entries = (
        len(key) <= MAX_METADATA_KEY and isinstance(text, str) and len(text) <= MAX_LABEL for key, text in value.items()
    )
    return len(value) <= MAX_METADATA and all(entries)


_METADATA: Final = Harmless(
    _is_metadata,
    {
        "type": ["object", "null"],
        "maxProperties": MAX_METADATA,
        "propertyNames": {"maxLength": MAX_METADATA_KEY},
        "additionalProperties": {"type": "string", "maxLength": MAX_LABEL},
    },
    f"an object of at most {MAX_METADATA} strings, their keys of at most {MAX_METADATA_KEY} characters and they of at "
    f"most {MAX_LABEL}",
)
_NOTHING: Final = one_of(None)
IGNORED: Final[dict[str, Harmless]] = {
    "metadata": _METADATA,
    "parallel_tool_calls": one_of(None, True, False),
    "tools": one_of(None, []),
    "tool_choice": one_of(None, "none", "auto"),
    "functions": one_of(None, []),
    "function_call": one_of(None, "none", "auto"),
    "modalities": one_of(None, ["text"]),
    "audio": _NOTHING,
    "reasoning_effort": one_of(None, "none"),
    "web_search_options": _NOTHING,
    "suffix": one_of(None, ""),
}
MESSAGE_IGNORED: Final[dict[str, Harmless]] = {
    "refusal": _NOTHING,
    "annotations": one_of(None, []),
    "audio": _NOTHING,
    "function_call": _NOTHING,
}
