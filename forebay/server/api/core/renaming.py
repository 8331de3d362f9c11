"""Helpers that turn requests of other APIs into chats: unions by `type`, and refusals in the names of the client's own
fields."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pydantic import BeforeValidator, Discriminator, ValidationInfo

from forebay.base.errors import RequestError
from forebay.server.protocol.images import accepts_images
from forebay.server.protocol.validation import UNSUPPORTED_FIELD, branch, by_shape, refusal


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Refusals that name a field of a chat name what the client's body has for it, by the first of `names` (patterns)
    that is the field or has it inside."""
    try:
        yield
    except RequestError as error:
        param = error.param or ""
        patterns = ((re.compile(rf"^{chat}(?=\.|$)"), ours) for chat, ours in names.items())
        own = next((chat.sub(ours, param) for chat, ours in patterns if chat.search(param)), param)
        if own != param:
            error.message = error.message.replace(param, own)
            error.param = own
        raise


def _type_of(value: Any, default: str) -> str | None:
    kind = value.get("type", default) if isinstance(value, dict) else getattr(value, "type", None)
    return kind if isinstance(kind, str) else None


def by_type(*kinds: str, default: str = "") -> Discriminator:
    """Return a discriminator of a union whose branches are tagged `branch(kind)`: it reads `type` of an object,
    `default` if the object has none."""

    def choose(value: Any) -> str | None:
        kind = _type_of(value, default)
        return branch(kind) if kind in kinds else None

    return by_shape(choose, f"an object whose type is one of {', '.join(kinds)}")


def only(*kinds: str, served: str, image: str = "") -> BeforeValidator:
    """Return a validator that refuses every type except `kinds`, with a message that lists `served`. The type `image`
    is accepted, too, if the model accepts images."""

    def check(value: Any, info: ValidationInfo) -> Any:
        kind = _type_of(value, kinds[0])
        images = image != "" and accepts_images(info)
        if kind is not None and kind not in kinds and not (images and kind == image):
            more = f", and images ({image})" if images else ""
            raise refusal(UNSUPPORTED_FIELD, "type", f"type is {kind[:64]!a}: only {served}{more}")
        return value

    return BeforeValidator(check)
