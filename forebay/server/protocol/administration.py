"""The bodies of the routes that administer an engine: its memory, weights, adapters and transfers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from forebay.server.protocol.requests import Host, Port
from forebay.server.protocol.strict import Label, Strict

Tags = Annotated[list[Label], Field(min_length=1, max_length=16, fail_fast=True)]
FilePath = Annotated[str, StringConstraints(min_length=1, max_length=4096)]


class ResumeRequest(Strict):
    """The body of a request to take memory again; without tags, all that was released."""

    tags: Tags | None = None


class PauseRequest(Strict):
    """The body of a request to pause: what happens to requests that run, and for how many seconds they may take."""

    mode: Literal["wait", "retract", "abort"] = "wait"
    timeout: Annotated[float, Field(ge=0, le=86400)] = 300.0


class ReleaseRequest(ResumeRequest, PauseRequest):
    """The body of a request to give memory back."""


class UpdateWeightsRequest(PauseRequest):
    """The body of a request to load other weights."""

    model_path: FilePath


class LoadAdapterRequest(Strict):
    """The body of a request to load an adapter. With `load_inplace` it takes the place of one of that name."""

    lora_name: Label
    lora_path: FilePath
    load_inplace: bool = False


class UnloadAdapterRequest(Strict):
    """The body of a request to unload an adapter, with the seconds that running requests have to end."""

    lora_name: Label
    timeout: Annotated[float, Field(ge=0, le=86400)] = 300.0


class CheckTransfersRequest(Strict):
    """The body of /check_transfers: the address of the prefill server."""

    bootstrap_host: Host
    bootstrap_port: Port
