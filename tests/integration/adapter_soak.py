"""Clients of several adapters, on every route, while adapters are loaded, reloaded and unloaded:
`python -m tests.integration.adapter_soak --minutes 2`.

Each answer must be, to the letter, that of a load that its name had meanwhile; 404, `adapter_lost` or `adapter_loading`
may come only while the name is being changed or is not loaded. In the end the server must hold what it held in the
beginning.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final

from forebay.base.errors import EngineError
from forebay.base.http_client import Connection, Origin
from tests.deadlines import HANGS_S, POLL_S, wait_until
from tests.engine.adapters import make_adapter
from tests.engine.conftest import make_chat_model
from tests.integration.test_processes import PATIENT
from tests.integration.tree import Tree, serving

CLIENTS: Final = 64
LENGTH: Final = 12
PROMPTS: Final = ("hello", "hello there", "a river")
ROOM: Final = ("--max-running-requests=32", f"--max-queued-requests={CLIENTS}")
STATIC, CHANGING = "static", ("red", "green", "blue")
VARIANTS: Final = ("a", "b")  # of each name that changes


@dataclass(frozen=True, slots=True)
class Route:
    """A way to ask: the body for a prompt, the field that names the adapter, and what of an answer or of each event of
    a stream is compared."""

    path: str
    body: Callable[[str], dict[str, Any]]
    content: Callable[[dict[str, Any]], Any]
    field: str = "model"
    is_cumulative: bool = False  # each event has all of the text

    def read(self, data: bytes) -> list[Any]:
        """Return what is compared; raise EngineError for an error in a stream."""
        lines = data.decode().splitlines()
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith(("data: {", "{"))]
        for event in events:
            if event.get("error"):
                raise EngineError(json.dumps(event))
        found = [self.content(event) for event in (events[-1:] if self.is_cumulative else events)]
        return ["".join(found)] if all(isinstance(each, str) for each in found) else found


def _chat(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


def _ollama(**fields: Any) -> dict[str, Any]:
    return {**fields, "options": {"temperature": 0, "num_predict": LENGTH}}


def _of_response(event: dict[str, Any]) -> str:
    if event.get("type") == "response.output_text.delta":
        return str(event["delta"])
    return "".join(part["text"] for item in event.get("output", ()) for part in item["content"])


def _of_message(event: dict[str, Any]) -> str:
    if event.get("type") == "message":
        return "".join(block["text"] for block in event["content"])
    return str(event.get("delta", {}).get("text", ""))


def _of_chat(event: dict[str, Any]) -> str:
    said = [choice.get("message") or choice["delta"] for choice in event["choices"]]
    return "".join(each.get("content") or "" for each in said)


def _routes() -> Iterator[Route]:
    for streams in (False, True):
        yield from _routes_of({"stream": streams})


def _routes_of(own: Mapping[str, bool]) -> Iterator[Route]:
    greedy = {"temperature": 0, "ignore_eos": True, "max_tokens": LENGTH}
    native = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": LENGTH}
    yield Route(
        "/v1/completions",
        lambda prompt: {"prompt": prompt, **greedy, **own},
        lambda event: "".join(choice["text"] for choice in event["choices"]),
    )
    yield Route("/v1/chat/completions", lambda prompt: {"messages": _chat(prompt), **greedy, **own}, _of_chat)
    yield Route(
        "/v1/messages",
        lambda prompt: {"messages": _chat(prompt), "temperature": 0, "max_tokens": LENGTH, **own},
        _of_message,
    )
    yield Route(
        "/v1/responses",
        lambda prompt: {"input": prompt, "temperature": 0, "max_output_tokens": LENGTH, **own},
        _of_response,
    )
    yield Route(
        "/generate",
        lambda prompt: {"text": prompt, "sampling_params": native, **own},
        lambda event: event["text"],
        "lora_path",
        is_cumulative=True,
    )
    yield Route(
        "/api/chat",
        lambda prompt: _ollama(messages=_chat(prompt), **own),
        lambda event: event["message"]["content"],
    )
    yield Route("/api/generate", lambda prompt: _ollama(prompt=prompt, **own), lambda event: event["response"])
    yield Route(
        "/completion",
        lambda prompt: {"prompt": prompt, "temperature": 0, "n_predict": LENGTH, **own},
        lambda event: event["content"],
    )
    yield Route("/v1/embeddings", lambda prompt: {"input": prompt}, lambda event: event["data"][0]["embedding"])
    yield Route("/api/embed", lambda prompt: {"input": prompt}, lambda event: event["embeddings"])


ROUTES: Final = tuple(_routes())


@dataclass(frozen=True, slots=True)
class Load:
    """One load of a name: its variant, None for a name that is not loaded. Two loads of a variant are not equal."""

    variant: str | None
    number: int = field(default_factory=itertools.count().__next__)


class Life:
    """The loads that a name may have had: one set after the other."""

    def __init__(self, variant: str | None) -> None:
        self._sets: list[set[Load]] = [{Load(variant)}]

    @property
    def is_loaded(self) -> bool:
        (load,) = self._sets[-1]
        return load.variant is not None

    @contextlib.contextmanager
    def becoming(self, variant: str | None) -> Iterator[None]:
        """While the body runs it may be either; behind it the new one, or after an exception the old one."""
        (old,), new = self._sets[-1], Load(variant)
        self._sets.append({old, new})
        try:
            yield
        except BaseException:
            new = old
            raise
        finally:
            self._sets.append({new})

    def watch(self) -> Callable[[], set[Load]]:
        """Return what returns, later, the loads that there have been since now."""
        begin = len(self._sets) - 1
        return lambda: set(itertools.chain.from_iterable(self._sets[begin:]))


class Refused(Exception):
    """An answer that is not 200."""


@dataclass
class AdapterSoak:
    """Clients and their server. `root` has the folders of all variants, `NAME-VARIANT`, and one that is broken."""

    tree: Tree
    root: Path
    names: tuple[str, ...]
    prompts: tuple[str, ...] = PROMPTS
    counts: Counter[str] = field(default_factory=Counter)
    answered: int = 0
    over: bool = False

    def __post_init__(self) -> None:
        self.origin = Origin(self.tree.url)
        with self.tree.client() as client:
            self.base = client.get("/v1/models").json()["data"][0]["id"]
        self.lives = {self.base: Life(""), STATIC: Life(STATIC), **{name: Life(None) for name in self.names}}
        self.right: dict[tuple[Route, str, str], list[Any]] = {}  # by route, prompt and variant

    def run(self, until: Callable[[], bool]) -> Counter[str]:
        """Soak until that is true, and see that nothing is left; what became of requests and loads."""
        before = self._held()
        asyncio.run(self._run(until))
        wait_until(lambda: self._held() == before, lambda: f"{self._held()}, and {before} before")
        assert self.tree.counted("ledger_violations") == self.tree.counted("engine.step_failures") == 0
        return self.counts

    def _held(self) -> dict[str, int]:
        """Return how many requests there are, and how many slots of each pool are in use but for cached ones."""
        state = self.tree.state()
        requests = {name: state[name] for name in ("num_running", "num_waiting")}
        slots = {pool["name"]: pool["total"] - pool["free"] - pool["cached"] for pool in state["pools"]}
        return {"inside": state["server"]["num_inside"], **requests, **slots}

    async def _run(self, until: Callable[[], bool]) -> None:
        await self._learn()
        async with asyncio.TaskGroup() as group:
            for name in self.names:
                group.create_task(self._change(name, Random(name)))
            for number in range(CLIENTS):
                group.create_task(self._ask_often(Random(number)))
            while not until():
                await asyncio.sleep(POLL_S)
            self.over = True
        connection = await Connection.connect(self.origin)
        for name in self.names:
            if self.lives[name].is_loaded:
                await self._post(connection, "unload", name, timeout=HANGS_S)
        connection.close()

    # -- what is right ------------------------------------------------------------------------------------------------

    async def _learn(self) -> None:
        """Ask for everything with each variant alone in the server."""
        connection = await Connection.connect(self.origin)
        variants = [f"{name}-{variant}" for name in self.names for variant in VARIANTS]
        for variant in ("", STATIC, *variants):
            name = {"": self.base, STATIC: STATIC}.get(variant, "probe")
            if name == "probe":
                await self._post(connection, "load", name, lora_path=variant)
            for route, prompt in itertools.product(ROUTES, self.prompts):
                self.right[route, prompt, variant] = await self._ask(connection, route, prompt, name)
            if name == "probe":
                await self._post(connection, "unload", name)
        connection.close()
        for route, prompt in itertools.product(ROUTES, self.prompts):
            found = [self.right[route, prompt, variant] for variant in ("", STATIC, *variants)]
            assert all(found.count(each) == 1 for each in found), (
                f"{route.path}: adapters with equal answers show little"
            )

    # -- clients ------------------------------------------------------------------------------------------------------

    async def _ask_often(self, rng: Random) -> None:
        connection = await Connection.connect(self.origin)
        while not self.over:
            if not connection.is_open:
                connection = await Connection.connect(self.origin)
            route, prompt, name = rng.choice(ROUTES), rng.choice(self.prompts), rng.choice([*self.lives])
            since = self.lives[name].watch()
            if rng.random() < 0.03:
                await self._give_up(connection, route, prompt, name, rng)
                continue
            async with asyncio.timeout(HANGS_S):
                try:
                    found = await self._ask(connection, route, prompt, name)
                except Refused as refused:
                    self._check_refusal(str(refused), since(), f"{route.path} {name}")
                else:
                    self._check(found, route, prompt, since())
            self.answered += 1
        connection.close()

    def _check(self, found: list[Any], route: Route, prompt: str, loads: set[Load]) -> None:
        variants = {load.variant for load in loads if load.variant is not None}
        known = {variant: self.right[route, prompt, variant] for variant in variants}
        assert found in known.values(), f"{route.path} {prompt!r}: {found}, not one of {known}"
        self.counts["right, of one load" if len(loads) == 1 else "right, while the name changed"] += 1
        self.counts[f"right {route.path}"] += 1

    def _check_refusal(self, text: str, loads: set[Load], where: str) -> None:
        lost = text.startswith("409") and ("adapter_lost" in text or "was loaded anew" in text)
        replaced = text.startswith("503") and "adapter_loading" in text
        assert lost or replaced or text.startswith("404"), f"{where}: {text}"
        assert len(loads) > 1 or {load.variant for load in loads} == {None}, f"{where} was there all the time: {text}"
        self.counts["adapter_lost" if lost else "adapter_loading" if replaced else "404"] += 1

    async def _ask(self, connection: Connection, route: Route, prompt: str, name: str) -> list[Any]:
        body = {
            **route.body(prompt),
            **({} if name == self.base and route.field == "lora_path" else {route.field: name}),
        }
        data = await connection.request("POST", route.path, body)
        if connection.status != 200:
            raise Refused(f"{connection.status} {data.decode()}")
        return route.read(data)

    async def _give_up(self, connection: Connection, route: Route, prompt: str, name: str, rng: Random) -> None:
        asked = asyncio.ensure_future(self._ask(connection, route, prompt, name))
        await asyncio.wait({asked}, timeout=0.02 * rng.random())
        connection.close()
        with contextlib.suppress(EngineError, Refused):
            await asked
        self.counts["given up"] += 1

    # -- loads and unloads --------------------------------------------------------------------------------------------

    async def _change(self, name: str, rng: Random) -> None:
        connection, life = await Connection.connect(self.origin), self.lives[name]
        while not self.over:
            try:
                await self._change_once(connection, life, name, rng)
            except Refused as refused:
                code = json.loads(str(refused)[4:])["error"]["code"]
                if code not in ("adapter_slots_taken", "invalid_adapter"):
                    raise
                self.counts[code] += 1
            enough = self.answered + rng.randrange(2 * CLIENTS)
            while self.answered < enough and not self.over:
                await asyncio.sleep(POLL_S)
        connection.close()

    async def _change_once(self, connection: Connection, life: Life, name: str, rng: Random) -> None:
        if rng.random() < 0.1:
            await self._post(connection, "load", name, lora_path="broken", load_inplace=True)
        elif life.is_loaded and rng.random() < 0.4:
            with life.becoming(None):
                await self._unload(connection, name, rng.choice((0, HANGS_S)))
        else:
            variant = f"{name}-{rng.choice(VARIANTS)}"
            with life.becoming(variant):
                await self._post(connection, "load", name, lora_path=variant, load_inplace=True)

    async def _unload(self, connection: Connection, name: str, timeout: float) -> None:
        """Unload, and wait up to `timeout` seconds for the slot: new requests get 404 either way."""
        try:
            await self._post(connection, "unload", name, timeout=timeout)
        except Refused as refused:
            if "adapter_draining" not in str(refused):
                raise
            self.counts["adapter_draining"] += 1

    async def _post(self, connection: Connection, what: str, name: str, **fields: Any) -> None:
        body = {"lora_name": name, **fields}
        data = await connection.request("POST", f"/v1/{what}_lora_adapter", body)
        if connection.status != 200:
            raise Refused(f"{connection.status} {data.decode()}")
        self.counts[what] += 1


def make_folders(model: Path, root: Path) -> Path:
    """Write the folders of all variants, and one that is broken."""
    names = [STATIC, *(f"{name}-{variant}" for name in CHANGING for variant in VARIANTS)]
    for seed, name in enumerate(names):
        make_adapter(model, root / name, seed=seed)
    shutil.copytree(root / STATIC, root / "broken")
    (root / "broken" / "adapter_config.json").write_text('{"peft_type": "LORA", "use_dora": true}')
    return root


@contextlib.contextmanager
def soaked(model: Path, folder: Path, names: tuple[str, ...], prompts: tuple[str, ...]) -> Iterator[AdapterSoak]:
    """A server of `model` whose adapters of these names are to change, with a slot to spare for each."""
    root = make_folders(model, folder / "adapters")
    slots = ["--enable-lora", f"--max-loras={1 + 2 * len(names)}", f"--lora-root={root}"]
    with serving(
        folder / "tree", model, *PATIENT, *ROOM, *slots, "--lora-modules", f"{STATIC}={root / STATIC}"
    ) as tree:
        yield AdapterSoak(tree, root, names, prompts)


def soak(model: Path, folder: Path, seconds: float) -> Counter[str]:
    """Soak with four adapters for so many seconds."""
    with soaked(model, folder, CHANGING, PROMPTS) as made:
        begin: list[float] = []

        def is_over() -> bool:
            begin.append(begin[0] if begin else time.monotonic())
            return time.monotonic() > begin[0] + seconds

        return made.run(is_over)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0)
    with tempfile.TemporaryDirectory() as scratch:
        tiny = make_chat_model(Path(scratch) / "model", context_length=256).path
        for what, number in sorted(soak(tiny, Path(scratch), 60 * parser.parse_args().minutes).items()):
            print(f"{number:8} {what}")
