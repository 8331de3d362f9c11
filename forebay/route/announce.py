"""Announces a server to every router for as long as the process that started it runs (`POST /members`)."""

from __future__ import annotations

import http.client
import secrets
import threading
import time
from collections.abc import Sequence
from typing import Final

import msgspec

from forebay.base.http_client import Origin
from forebay.base.log import event, get_logger
from forebay.base.proof import PROOF, Message, digest_of, prove
from forebay.route.announcement import ANNOUNCE_INTERVAL_S, MEMBERS_PATH, Announcement, Role, State

POST_TIMEOUT_S: Final = 2.0
RETRY_S: Final = 0.5  # after a failure
_INSTANCE_BYTES: Final = 16

log = get_logger("route")


class Announcer:
    """Repeats the announcement of one server to all routers every 3 s, and at once after each change.

    One daemon thread for each router does the sending, so that a router that is away delays no other. A failure is
    logged once and tried again; no method raises because of a router. All methods may be called from any thread.
    """

    def __init__(
        self,
        routers: Sequence[str],
        url: str,
        role: Role,
        cluster_key: bytes = b"",
        *,
        weight_version: str = "",
        interval_s: float = ANNOUNCE_INTERVAL_S,
    ) -> None:
        self._url, self._role, self._weight_version = url, role, weight_version
        self._instance, self._state = secrets.token_hex(_INSTANCE_BYTES), State.STARTING
        self._changed = threading.Condition()
        self._num_changes = 0
        self._closed = False
        self._lines = [_Line(self, Origin(router), cluster_key, interval_s) for router in routers]

    @property
    def instance(self) -> str:
        """The id of the process that is announced now."""
        return self._instance

    def start(self) -> None:
        """Begin to announce, as `starting`."""
        for line in self._lines:
            line.thread.start()

    def begin_instance(self, weight_version: str = "") -> str:
        """Announce a new process at the same URL, as `starting`. Call it before each start of the process."""
        with self._changed:
            self._instance = secrets.token_hex(_INSTANCE_BYTES)
            self._state, self._weight_version = State.STARTING, weight_version
            self._note_change()
            return self._instance

    def announce(self, state: State, *, weight_version: str | None = None, wait_s: float = 0.0) -> list[str]:
        """Announce a change at once. Return the routers that have not confirmed it within `wait_s`.

        Once a router has confirmed `draining` or `gone` it sends no new requests.
        """
        with self._changed:
            self._state = state
            if weight_version is not None:
                self._weight_version = weight_version
            self._note_change()
            change = self._num_changes
            self._changed.wait_for(lambda: not self._unconfirmed(change), wait_s)
            return self._unconfirmed(change)

    def close(self, wait_s: float = POST_TIMEOUT_S) -> list[str]:
        """Announce that the server is gone and end. Return the routers that have not confirmed it within `wait_s`."""
        unconfirmed = self.announce(State.GONE, wait_s=wait_s)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        return unconfirmed

    def _note_change(self) -> None:
        self._num_changes += 1
        self._changed.notify_all()

    def _unconfirmed(self, change: int) -> list[str]:
        return [str(line.router) for line in self._lines if line.num_confirmed < change]

    # The side of a router's thread

    def next_announcement(self, num_sent: int, wait_s: float) -> tuple[int, Announcement] | None:
        """Wait for a change after those that were sent, for at most `wait_s`. Return how many changes there are, and
        the announcement to send; None once this is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._num_changes > num_sent, wait_s)
            if self._closed:
                return None
            return self._num_changes, Announcement(
                url=self._url,
                role=self._role,
                instance=self._instance,
                weight_version=self._weight_version,
                state=self._state,
                sequence=time.monotonic_ns(),
            )

    def confirm(self, line: _Line, change: int) -> None:
        """Note that a router knows all changes up to this one."""
        with self._changed:
            line.num_confirmed = max(line.num_confirmed, change)
            self._changed.notify_all()


class _Line:
    """The announcements to one router."""

    def __init__(self, announcer: Announcer, router: Origin, cluster_key: bytes, interval_s: float) -> None:
        self.router, self.num_confirmed = router, -1
        self._announcer, self._interval_s = announcer, interval_s
        self._cluster_key = cluster_key
        self._failure = ""
        self.thread = threading.Thread(target=self._run, name=f"announce-{router.host}", daemon=True)

    def _run(self) -> None:
        num_sent, wait_s = -1, self._interval_s
        while (due := self._announcer.next_announcement(num_sent, wait_s)) is not None:
            num_sent, announcement = due
            failure = self._post(msgspec.json.encode(announcement))
            if failure != self._failure:  # a router that is away for long is one line
                self._failure = failure
                log.warning(event("announced_again" if not failure else "not_announced", to=self.router, why=failure))
            wait_s = min(RETRY_S, self._interval_s) if failure else self._interval_s
            if not failure:
                self._announcer.confirm(self, num_sent)

    def _headers(self, body: bytes) -> dict[str, str]:
        host = self.router.authority
        headers = {"Host": host, "Content-Type": "application/json", "Connection": "close"}
        if not self._cluster_key:
            return headers
        message = Message(method="POST", target=MEMBERS_PATH, host=host)
        return {**headers, PROOF: prove(self._cluster_key, message, digest_of(body))}

    def _post(self, body: bytes) -> str:
        """Send one announcement; return why it failed, or ""."""
        kind = http.client.HTTPSConnection if self.router.scheme == "https" else http.client.HTTPConnection
        connection = kind(self.router.host, self.router.port, timeout=POST_TIMEOUT_S)
        try:
            connection.request("POST", self.router.prefix + MEMBERS_PATH, body, self._headers(body))
            answer = connection.getresponse()
            text = answer.read(1000).decode(errors="replace")
            return "" if answer.status == 200 else f"HTTP {answer.status}: {text}"
        except (OSError, http.client.HTTPException) as error:
            return str(error) or type(error).__name__
        finally:
            connection.close()
