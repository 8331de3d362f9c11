"""The survey of one node before anything starts there; Ray runs it as a task."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import os
import platform
import socket
from pathlib import Path
from typing import Final

import msgspec

from forebay.base.errors import ConfigError, ForebayError
from forebay.base.package import __version__
from forebay.cluster.messages import Facts, Survey
from forebay.cluster.ports import listeners
from forebay.cluster.surroundings import AUTH_MODE, environment_of_process, gcs_timeout_s, niceness_of
from forebay.config.flag import Settled
from forebay.config.keys import cluster_key, read_text
from forebay.config.machine import Amount

MAX_KEY_FILE_BYTES: Final = 1 << 16
_SALT: Final = b"forebay cluster: the same key on every node"


def survey(request: bytes) -> bytes:
    """Return the `Facts` of this node for a `Survey`."""
    asked = msgspec.msgpack.decode(request, type=Survey)
    raylet = environment_of_process(os.getppid())
    facts = Facts(
        hostname=socket.gethostname(),
        forebay=__version__,
        python=platform.python_version(),
        auth_mode=raylet.get(AUTH_MODE, ""),
        niceness=niceness_of(raylet),
        gcs_timeout_s=gcs_timeout_s(raylet),
        listeners=listeners(),
    )
    try:
        return planned(asked, facts).encode()
    except ForebayError as error:
        return msgspec.structs.replace(facts, problem=error.message.splitlines()[0]).encode()


def planned(asked: Survey, facts: Facts) -> Facts:
    """Return the facts with what one server needs here. Raises ForebayError if none can run: a file is missing, or the
    model, or the memory."""
    for path in asked.key_files:
        read_text(Path(path), "this node's key file", MAX_KEY_FILE_BYTES)
    if asked.cluster_key_file:
        digest = hashlib.sha256(_SALT + cluster_key(Settled({"cluster_key_file": asked.cluster_key_file})))
        facts = msgspec.structs.replace(facts, key_digest=digest.hexdigest()[:16])
    return facts if asked.share == 0 else _with_needs(asked, facts)


def _with_needs(asked: Survey, facts: Facts) -> Facts:
    from forebay.cli.plan import make_plan
    from forebay.cli.serve import parse
    from forebay.engine.lifecycle.model_shape import read_shape
    from forebay.engine.lifecycle.served_files import check_served_files

    with contextlib.redirect_stderr(io.StringIO()):  # notes on settings, which the command prints
        parsed = parse(asked.words)
        if model := parsed.absent_model():
            raise ConfigError(f"the model {model} is not on this node: run forebay models pull there, or name a folder")
        memory = Amount(asked.memory_bytes // asked.share, f"for one of {asked.share} servers of this node")
        plan = make_plan(parsed, memory, path=None, read=functools.cache(read_shape), check=check_served_files)
    threads = parsed.values.get("num_threads", max(1, int(asked.num_cpus) // asked.share))
    return msgspec.structs.replace(
        facts,
        num_threads=int(str(threads)),
        memory_bytes=plan.needed_bytes,
        kv_cache_bytes=plan.kv_cache_bytes,
    )
