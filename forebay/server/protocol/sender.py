"""Fields about the sender and the model, shared by all bodies for which the model computes."""

from __future__ import annotations

from typing import Annotated

from pydantic import StringConstraints

from forebay.server.http.isolation import Session
from forebay.server.protocol.strict import Label, Strict


class Sender(Strict):
    model: Annotated[str, StringConstraints(max_length=512)] | None = None
    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    cache_salt: Annotated[str, StringConstraints(max_length=128)] | None = None

    @property
    def session(self) -> Session:
        return Session(
            self.user or "", self.safety_identifier or "", self.prompt_cache_key or "", self.cache_salt or ""
        )
