"""Receipts: what an answer was computed from, and its token ids, so that anyone can repeat and compare it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
import numpy as np

from forebay.base.errors import InvalidRequest
from forebay.base.receipts import FORMAT, digest, digest_of
from forebay.requests.sampling_params import RANDOM_SEED, SamplingParams
from forebay.server.protocol.requests import ChatRequest, CompletionRequest

_SEED_BITS: Final = 31


class Receipt(msgspec.Struct, kw_only=True, frozen=True):
    """A receipt of one choice. `environment` has the digests and names of what computed, the chat template's among
    them. `prompt_digest` is that of the prompt's token ids, `sampling_digest` that of the sampling parameters
    without their `seed`. With the same of all these the token ids are `output_ids`. `digest` is that of all other
    fields."""

    receipt_format: int
    environment: dict[str, str]
    weight_version: int
    adapter_digest: str
    prompt_digest: str
    prompt_tokens: int
    sampling_digest: str
    seed: int
    output_ids: list[int]
    digest: str = ""


def seed_of(seed: int) -> int:
    """Return the seed, or one that is drawn here if none is given: a receipt names the seed."""
    return secrets.randbits(_SEED_BITS) if seed == RANDOM_SEED else seed


def takes_receipt(body: CompletionRequest | ChatRequest, num_choices: int) -> bool:
    """Return whether the answer has a receipt: if the body wants one, or does not say and is of one choice. Raises
    InvalidRequest if the body wants one of several choices."""
    if body.receipt and num_choices > 1:
        raise InvalidRequest(
            f"receipt is of one choice, and this request has {num_choices}: send one prompt, without n and best_of",
            param="receipt",
        )
    return body.receipt or ("receipt" not in body.model_fields_set and num_choices == 1)


def receipt_of(
    *,
    environment: Mapping[str, str],
    weight_version: int,
    adapter: str,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    seed: int,
    output_ids: Sequence[int],
) -> Receipt:
    """Return the receipt of an answer. `adapter` is the digest of the adapter's tensors, "" for none."""
    sampling = msgspec.to_builtins(msgspec.structs.replace(params, seed=RANDOM_SEED), str_keys=True)
    found = Receipt(
        receipt_format=FORMAT,
        environment=dict(environment),
        weight_version=weight_version,
        adapter_digest=adapter,
        prompt_digest=digest(np.asarray(prompt_ids, "<u4").tobytes()),
        prompt_tokens=len(prompt_ids),
        sampling_digest=digest(msgspec.json.encode(sampling, order="sorted")),
        seed=seed,
        output_ids=[*output_ids],
    )
    return msgspec.structs.replace(found, digest=digest_of(msgspec.to_builtins(found)))
