"""An answer that a client has stored with its receipt, and its repetition by a server."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final, Self

from forebay.base.errors import ConfigError, brief
from forebay.base.receipts import FORMAT, digest_of
from forebay.verify.remote.server import CHAT, COMPLETIONS, Server

_FILE: Final = 'a JSON object with the "request" and its "answer" is expected'
_NAMES: Final = {
    "prompt_digest": "the prompt's tokens",
    "sampling_digest": "the sampling parameters",
    "adapter_digest": "the adapter's tensors",
}


@dataclass(frozen=True, slots=True)
class Stored:
    """A request as it was sent, and the receipt of its answer."""

    request: Mapping[str, Any]
    receipt: Mapping[str, Any]

    @property
    def model(self) -> str | None:
        """Return the model that the request names."""
        return self.request.get("model")

    @property
    def route(self) -> str:
        """Return the route that the request was sent to."""
        return COMPLETIONS if "prompt" in self.request else CHAT

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file. Raises ConfigError for one that is something else, and for a receipt that was changed."""
        try:
            whole = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise ConfigError(f"--receipt {path}: {error}: {_FILE}") from None
        request, answer = (whole.get(name) if isinstance(whole, dict) else None for name in ("request", "answer"))
        if not isinstance(request, dict) or not isinstance(answer, dict):
            raise ConfigError(f"--receipt {path}: {_FILE}")
        return cls(request, receipt_in(answer, f"--receipt {path}: the answer"))


def receipt_in(answer: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return the receipt of an answer. Raises ConfigError if there is none, of another format, or a changed one."""
    usage = answer.get("usage")
    receipt = usage.get("receipt") if isinstance(usage, dict) else None
    if not isinstance(receipt, dict):
        raise ConfigError(f'{where} has no receipt in its usage: send the request with "receipt": true')
    if receipt.get("receipt_format") != FORMAT:
        raise ConfigError(f"{where} has a receipt of format {brief(receipt.get('receipt_format'))}; read is {FORMAT}")
    if digest_of(receipt) != receipt.get("digest") or not _is_whole(receipt):
        raise ConfigError(f"{where} has a receipt that was changed: its digest is that of other values")
    return receipt


def _is_whole(receipt: Mapping[str, Any]) -> bool:
    ids, environment = receipt.get("output_ids"), receipt.get("environment")
    return isinstance(environment, dict) and isinstance(ids, list) and all(type(token) is int for token in ids)


async def repeat(stored: Stored, server: Server) -> list[str]:
    """Send the request again, alone and in a namespace of its own; return what differs, line by line, nothing if the
    tokens are the same. If the server computes with something else, nothing is sent."""
    receipt = stored.receipt
    if changed := environment_changes(receipt["environment"], await server.environment()):
        return [*changed, "nothing was run: start a server with what the receipt names"]
    body = {**stored.request, "receipt": True, "seed": receipt["seed"], "cache_salt": uuid.uuid4().hex}
    for name in ("stream", "stream_options"):
        body.pop(name, None)
    answer = await server.answer(stored.route, body)
    return differences(receipt, receipt_in(answer, f"{server.url}: the answer"))


def environment_changes(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return a line for each part of what computes that differs."""
    names = [name for name in {**then, **now} if then.get(name, "") != now.get(name, "")]
    return [f"{name}: {then.get(name) or 'none'} then, {now.get(name) or 'none'} now" for name in names]


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return what differs in two receipts of one request: what went in, or else the first token that differs."""
    if changed := environment_changes(then["environment"], now["environment"]):
        return changed
    if inputs := [f"{what} differ" for name, what in _NAMES.items() if then[name] != now[name]]:
        return inputs
    return _tokens(then["output_ids"], now["output_ids"])


def _tokens(then: Sequence[int], now: Sequence[int]) -> list[str]:
    for number, (one, other) in enumerate(zip_longest(then, now)):
        if one != other:
            shown = ("its end" if token is None else f"token id {token}" for token in (one, other))
            return ["same until token {}: {} then, {} now".format(number, *shown)]
    return []
