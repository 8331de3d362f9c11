"""OpenAI's fields that this server does nothing with: they pass with a value that changes nothing in the answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from forebay.base.foreign import neutral_values
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


def neutral(body: str) -> dict[str, Harmless]:
    """Return the fields of a table of `neutral` in `base/foreign.toml`; null changes nothing either."""
    return {name: one_of(None, *values) for name, values in neutral_values(body).items()}


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
IGNORED: Final = {"metadata": _METADATA, **neutral("openai")}
MESSAGE_IGNORED: Final = neutral("message")
