"""The actor of one server or router: it starts the process, watches it, starts it again and announces it. Nothing here
imports Ray."""

from __future__ import annotations

import http.client
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec

from forebay.base.errors import EngineError
from forebay.base.exit_codes import EXIT_REFUSED
from forebay.base.exposure import is_unspecified
from forebay.base.log import event, get_logger
from forebay.base.topology import this_topology
from forebay.cluster.cores import Cores, lock_folder
from forebay.cluster.messages import LogRequest, Phase, Spec, Status, Update, Updated
from forebay.cluster.ports import listen_on, listen_on_free_port
from forebay.cluster.process import Child, Log, log_folder
from forebay.cluster.surroundings import (
    environment_of_process,
    environment_of_server,
    note_of_niceness,
    wanted,
)
from forebay.config.flag import Settled
from forebay.config.keys import all_keys, cluster_key
from forebay.route.announce import Announcer
from forebay.route.announcement import Role, State
from forebay.route.restarts import END_GRACE_S, LONG_LIFE_S, LONGEST_WAIT_S

POLL_S: Final = 0.1  # while a server starts
LOOK_S: Final = 3.0  # while it serves: its weight version is asked for
ASK_TIMEOUT_S: Final = 2.0
UPDATE_TIMEOUT_S: Final = 3600.0
CONFIRM_S: Final = 5.0  # for routers to stop sending to a server that drains
FIRST_WAIT_S: Final = 0.5
BIND_RETRY_S: Final = 0.2
_LINES: Final = 5  # of the log, behind the exit code

log = get_logger("cluster")


class Replica:
    """One process, for the life of the actor. Arguments and return values are messages as bytes.

    Ray calls the constructor again after each failure, perhaps on another node. `place` returns by the server's name
    the address of the node and the last update of weights, which this object may not have seen."""

    def __init__(self, spec: bytes, place: Callable[[str], tuple[str, Update | None]]) -> None:
        self._spec = msgspec.msgpack.decode(spec, type=Spec)
        self._node_address, self._update = place(self._spec.name)
        self._host = self._spec.host or self._node_address
        self._phase, self._why = Phase.STARTING, ""
        self._num_starts, self._weight_version = 0, ""
        self._announced = ("", "")  # as ready: the instance and its weight version
        self._notes: tuple[str, ...] = ()
        self._cores = Cores(lock_folder())
        self._ending = threading.Event()
        self._announcing = threading.Lock()  # so that nothing is announced after `draining`
        self._log = Log(log_folder() / f"{self._spec.name}.log")
        self._sock: socket.socket | None = None
        self._url = ""
        self._child: Child | None = None
        self._announcer: Announcer | None = None
        settings = {"api_key_file": self._spec.api_key_file, "admin_api_key_file": self._spec.admin_api_key_file}
        users, admins = all_keys(Settled({name: path for name, path in settings.items() if path}))
        self._key = users[0].text if users else ""
        self._admin_key = admins[0].text if admins else ""
        self._thread = threading.Thread(target=self._run, name="replica", daemon=True)
        self._thread.start()

    # Methods that commands call

    def status(self) -> bytes:
        """Return a `Status`."""
        return self._status().encode()

    def spec(self) -> bytes:
        """Return the `Spec`, for another actor like this one."""
        return self._spec.encode()

    def log(self, request: bytes) -> bytes:
        """Return a `LogPart` for a `LogRequest`."""
        return self._log.read(msgspec.msgpack.decode(request, type=LogRequest)).encode()

    def drain(self) -> bytes:
        """Set `draining` in all routers, send SIGTERM, and wait for the process to end. Return a `Status`."""
        announcer = self._announcer
        with self._announcing:
            self._ending.set()
            self._phase = Phase.DRAINING
            unconfirmed = announcer.announce(State.DRAINING, wait_s=CONFIRM_S) if announcer else []
        if unconfirmed:
            log.warning(event("drain_unconfirmed", server=self._spec.name, routers=",".join(unconfirmed)))
        if self._child is not None:
            self._child.end(self._spec.drain_timeout_s + END_GRACE_S)
        self._thread.join()
        if self._announcer is not None:
            self._announcer.close(ASK_TIMEOUT_S)
        self._phase = Phase.ENDED
        self._close()
        return self.status()

    def update_weights(self, update: bytes) -> bytes:
        """Load other weights of the same model, given by an `Update`. Return an `Updated`."""
        target = msgspec.msgpack.decode(update, type=Update)
        problem = self._load(target.path)
        if not problem:
            self._update = target
            self._look()
        return Updated(problem=problem, status=self._status()).encode()

    def _close(self) -> None:
        if self._child is not None:
            self._child.close()
        if self._sock is not None:
            self._sock.close()
        self._cores.release()

    # The thread that watches the process

    def _run(self) -> None:
        sock = self._listen()
        if sock is None:
            return
        self._announcer = self._make_announcer()
        kind = "route" if self._spec.role is None else "serve"
        self._child = child = Child(kind, self._words(), sock, self._log)
        wait_s = FIRST_WAIT_S
        while not self._ending.is_set():
            started = time.monotonic()
            code = self._serve_once(child)
            if self._ending.is_set():
                break
            served, self._phase = self._phase is Phase.READY, Phase.STARTING
            if self._announcer is not None:
                self._announcer.begin_instance()  # which no router sends requests to
            self._why = f"the last process ended with code {code}: {self._log.last_lines(_LINES)}"
            log.warning(event("server_ended", server=self._spec.name, code=code))
            if code == EXIT_REFUSED and not served:
                self._phase = Phase.REFUSED
                if self._announcer is not None:
                    self._announcer.announce(State.GONE)
                break
            if time.monotonic() - started < LONG_LIFE_S:
                self._ending.wait(wait_s)
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)
            else:
                wait_s = FIRST_WAIT_S

    def _listen(self) -> socket.socket | None:
        """Return the socket, or None if a drain begins first. A router has one port, which the process of the actor
        before may still have; the address of a server may not be up yet."""
        while not self._ending.is_set():
            try:
                if self._spec.port:
                    self._sock = listen_on(self._host, self._spec.port)
                else:
                    self._sock = listen_on_free_port(self._host)
                host, port = self._sock.getsockname()[:2]
                host = self._node_address if is_unspecified(host) else host
                self._url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
                return self._sock
            except EngineError as error:
                self._why = error.message
            except OSError as error:
                self._why = f"{self._host}:{self._spec.port} cannot be used: {error.strerror}"
            self._ending.wait(BIND_RETRY_S)
        return None

    def _words(self) -> list[str]:
        if self._spec.role is None:
            return list(self._spec.words)
        words = [*self._spec.words, f"--host={self._host}"]
        if self._spec.role is Role.PREFILL:
            with listen_on_free_port(self._host) as probe:
                words.append(f"--disaggregation-bootstrap-port={probe.getsockname()[1]}")
        return words

    def _make_announcer(self) -> Announcer | None:
        if self._spec.role is None:
            return None
        path = self._spec.cluster_key_file
        key = cluster_key(Settled({"cluster_key_file": path} if path else {}))
        announcer = Announcer(self._spec.routers, self._url, self._spec.role, key)
        announcer.start()
        return announcer

    def _serve_once(self, child: Child) -> int:
        """Start the process and return its exit code."""
        raylet = os.getppid()
        count = int(self._spec.needs.num_cpus)
        if self._spec.role is not None and not self._cores.cpus:
            self._cores.take(count, this_topology())
        surroundings = wanted(self._cores.cpus, raylet)
        self._num_starts += 1
        child.start(surroundings, environment_of_server(environment_of_process(raylet)))
        if self._ending.is_set():  # since the last look: the drain found no process
            child.end(0.0)
        log.info(event("server_started", server=self._spec.name, at=self._url, pid=child.pid))
        code = self._wait_ready(child)
        shared = self._spec.role is not None and not self._cores.cpus
        notes = (
            note_of_niceness(child.pid, surroundings.niceness),
            f"its {count} threads have no cores of their own: other servers have those" if shared else "",
        )
        self._notes = tuple(note for note in notes if note)
        while code is None:
            code = child.wait(LOOK_S)
            if code is None:
                self._look()
                self._log.trim()
        return code

    def _wait_ready(self, child: Child) -> int | None:
        """Return the exit code if the process ends before it is ready."""
        path = "/health" if self._spec.role is None else "/ready"
        while self._ask("GET", path)[0] != http.client.OK:
            code = child.wait(POLL_S)
            if code is not None:
                return code
        if self._update is not None:
            for _ in range(self._update.num_updates):  # peers compare how often weights were updated
                if problem := self._load(self._update.path):
                    self._why = problem
                    child.end(END_GRACE_S)
                    return child.wait(0.0)
        if not self._ending.is_set():
            self._look()
            self._phase, self._why = Phase.READY, ""
        return None

    def _look(self) -> None:
        """Ask the server for its weight version, and announce a change."""
        if self._announcer is None:
            return
        status, body = self._ask("GET", "/server_info")
        if status == http.client.OK:
            self._weight_version = str(body.get("weight_version", ""))
        news = (self._announcer.instance, self._weight_version)
        with self._announcing:
            if news != self._announced and not self._ending.is_set():
                self._announced = news
                self._announcer.announce(State.READY, weight_version=self._weight_version)

    def _load(self, path: str) -> str:
        """Have the server load weights; return why it did not, or ""."""
        status, body = self._ask(
            "POST", "/update_weights_from_disk", {"model_path": path}, self._admin_key or self._key, UPDATE_TIMEOUT_S
        )
        if status == http.client.OK:
            return ""
        error = body.get("error")
        return str(error.get("message") if isinstance(error, dict) else body or f"HTTP {status}")

    def _ask(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        key: str = "",
        timeout_s: float = ASK_TIMEOUT_S,
    ) -> tuple[int, dict[str, Any]]:
        """Return the status and the object of an answer; status 0 if there is none."""
        assert self._sock is not None
        host, port = self._sock.getsockname()[:2]
        if is_unspecified(host):
            host = "::1" if ":" in host else "127.0.0.1"
        connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
        headers = {"Authorization": f"Bearer {key or self._key}"} if key or self._key else {}
        try:
            content = None if body is None else msgspec.json.encode(body)
            connection.request(method, path, content, headers | {"Content-Type": "application/json"})
            answer = connection.getresponse()
            found = msgspec.json.decode(answer.read() or b"{}")
            return answer.status, found if isinstance(found, dict) else {}
        except (OSError, http.client.HTTPException, msgspec.DecodeError):
            return 0, {}
        finally:
            connection.close()

    def _status(self) -> Status:
        return Status(
            name=self._spec.name,
            role=self._spec.role,
            phase=self._phase,
            url=self._url,
            pid=self._child.pid if self._child is not None else 0,
            instance=self._announcer.instance if self._announcer is not None else "",
            weight_version=self._weight_version,
            num_starts=self._num_starts,
            why=self._why,
            node_address=self._node_address,
            hostname=socket.gethostname(),
            cpus=self._cores.cpus,
            notes=self._notes,
        )
