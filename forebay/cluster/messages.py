"""The messages between the commands, which are clients of Ray, and the actors: msgspec structs, sent as bytes.

No message holds a key. Keys are files at the same path on every node, and messages hold the paths.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

from forebay.route.announcement import Role


class Phase(StrEnum):
    """The state of an actor's process."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    REFUSED = "refused"  # its configuration or checkpoint cannot be served: it is not started again
    ENDED = "ended"  # after a drain


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all messages."""

    def encode(self) -> bytes:
        """Return the message as msgpack."""
        return msgspec.msgpack.encode(self)


class Needs(Message, frozen=True, kw_only=True):
    """Resources that Ray reserves for one actor."""

    num_cpus: float
    memory_bytes: int = 0
    num_gpus: float = 0.0


class Spec(Message, frozen=True, kw_only=True):
    """The process of an actor: the whole of its constructor's arguments. `words` follow `forebay serve`, or `forebay
    route` for a router, which has no role.

    A server listens on a free port of `host`, or of its node's address if that is empty; a router on `port`. `group`
    names the placement group of a pair."""

    name: str
    role: Role | None
    words: tuple[str, ...]
    needs: Needs
    host: str
    port: int = 0
    routers: tuple[str, ...] = ()
    node_address: str = ""  # of a router: it stays on this node
    cluster_key_file: str = ""
    api_key_file: str = ""
    admin_api_key_file: str = ""
    drain_timeout_s: float = 30.0
    group: str = ""


class Update(Message, frozen=True, kw_only=True):
    """Weights that replaced those of the words: the last path, and how many updates there were (`weight_version`)."""

    path: str
    num_updates: int


class Status(Message, frozen=True, kw_only=True):
    """The state of one actor and its process."""

    name: str
    role: Role | None
    phase: Phase
    url: str
    pid: int
    instance: str
    weight_version: str
    num_starts: int
    why: str  # where the process is not ready: how the last one ended
    node_address: str
    hostname: str
    cpus: tuple[int, ...]  # that are its own; empty where it shares all
    notes: tuple[str, ...]


class Start(Message, frozen=True, kw_only=True):
    """An `up` that has not finished: the process of the command, and the actors that it starts."""

    hostname: str
    pid: int
    names: tuple[str, ...]


class Updated(Message, frozen=True, kw_only=True):
    """The answer to an update of weights; `problem` is empty if it succeeded."""

    problem: str
    status: Status


class LogRequest(Message, frozen=True, kw_only=True):
    """Ask for the log from byte `offset` on; a negative one counts from the end."""

    offset: int
    max_bytes: int = 1 << 20


class LogPart(Message, frozen=True, kw_only=True):
    """Bytes of a log, and the offset behind them."""

    text: bytes
    next_offset: int


class Survey(Message, frozen=True, kw_only=True):
    """Questions to a node before anything starts there. `words` are those of one server, and `share` of them are
    planned with: the CPUs and the memory of the node divided by it."""

    words: tuple[str, ...]
    share: int
    num_cpus: float
    memory_bytes: int
    key_files: tuple[str, ...] = ()
    cluster_key_file: str = ""


class Listener(Message, frozen=True, kw_only=True):
    """A TCP socket that listens."""

    port: int
    address: str
    process: str


class Facts(Message, frozen=True, kw_only=True):
    """The answers of a node. `problem` says in one line why no server can run there."""

    hostname: str
    forebay: str
    python: str
    auth_mode: str  # RAY_AUTH_MODE of its raylet
    niceness: int  # that Ray gives its workers
    gcs_timeout_s: int  # without the GCS a raylet ends itself after it
    listeners: tuple[Listener, ...] = ()
    key_digest: str = ""
    problem: str = ""
    num_threads: int = 0
    memory_bytes: int = 0
    kv_cache_bytes: int = 0


DEFAULT_GCS_TIMEOUT_S: Final = 60
DEFAULT_NICENESS: Final = 15
