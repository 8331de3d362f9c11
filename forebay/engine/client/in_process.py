"""An engine in this process, and the requests that a call runs in it."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from forebay.base.errors import Conflict, GenerationError
from forebay.engine.client.writing import RequestOutput, Writing
from forebay.engine.frames import AddRequest, Ready
from forebay.engine.loop.build import trim
from forebay.engine.loop.core import EngineCore, close
from forebay.engine.loop.loop import STUCK_WAIT_S
from forebay.engine.stream import merge
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.updates import Update
from forebay.text.tokenizer import Tokenizer


class InProcess:
    """An engine in this process, until `close`: each call feeds it with requests and collects their updates."""

    def __init__(self, core: EngineCore, info: Ready, tokenizer: Tokenizer) -> None:
        self._open: EngineCore | None = core
        self.info, self._tokenizer = info, tokenizer
        self.ids = itertools.count(1)  # of requests

    def close(self) -> None:
        """Free all memory. Idempotent; nothing can be generated afterwards."""
        core, self._open = self._open, None
        if core is not None:
            close(core)
        trim()

    @property
    def is_closed(self) -> bool:
        return self._open is None

    @property
    def core(self) -> EngineCore:
        """The engine. Raises Conflict once it is closed."""
        if self._open is None:
            raise Conflict("this LLM is closed: make another", code="closed")
        return self._open

    def write(
        self,
        outputs: Iterable[tuple[RequestOutput, list[int]]],
        params: Iterator[SamplingParams],
        prompts: Iterable[object],
        shown: bool,
        raise_on_error: bool,
        adapter: str = "",
    ) -> list[RequestOutput]:
        """Generate all `outputs`, each given with the lengths from which later requests are likely to continue."""
        self._check_adapter(adapter)
        written: list[Writing] = []

        def requests() -> Iterator[_Asked]:
            for output, places in outputs:
                writing = Writing(output, next(params), self._tokenizer)
                written.append(writing)
                asked = [
                    _Asked(self._request(output, how, places, adapter), writing, i)
                    for i, how in enumerate(writing.asked)
                ]
                writing.begin([_Source(self.core, one.request.request_id) for one in asked])
                yield from asked

        total = len(prompts) if isinstance(prompts, Sequence) else None
        with _Bar("generating", total, shown=shown) as bar, closing(self._run(requests())) as updates:
            for one, update in updates:
                writing = one.writing
                if writing is not None and writing.output.outputs[one.index].finish_reason is None:
                    writing.take(one.index, update)
                    bar.show(len(update.token_ids), done=writing.finished)
        found = [writing.output for writing in written]
        _raise_failures(found, raise_on_error)
        return found

    def pool(
        self, outputs: list[RequestOutput], params: SamplingParams, shown: bool, adapter: str = ""
    ) -> list[Update]:
        """Return the results of pooled prompts; their `outputs` report the cache. Raises as `generate`."""
        self._check_adapter(adapter)
        requests = (self._request(output, params, [], adapter) for output in outputs)
        asked = [_Asked(request, None, place) for place, request in enumerate(requests)]
        results: dict[int, Update] = {}
        with _Bar("reading", len(outputs), shown=shown) as bar, closing(self._run(iter(asked))) as updates:
            for one, update in updates:
                results[one.index], output = update, outputs[one.index]
                output.cache = update.cache or output.cache
                output.error = update.failure.error if update.failure else None
                bar.show(len(output.prompt_token_ids), done=True)
        _raise_failures(outputs, True)
        return [results[place] for place in range(len(outputs))]

    def _check_adapter(self, name: str) -> None:
        """Raise NotFound for an adapter that is not loaded."""
        if name:
            self.core.scheduler.pools.adapters.named(name)

    def _request(self, output: RequestOutput, params: SamplingParams, places: list[int], adapter: str) -> AddRequest:
        return AddRequest(
            request_id=next(self.ids),
            prompt_token_ids=output.prompt_token_ids,
            params=params,
            resume_points=places,
            adapter=adapter,
        )

    def _run(self, wanted: Iterator[_Asked]) -> Generator[tuple[_Asked, Update], None, None]:
        """Yield the updates of each request: all at once when it ends, or as they come for streams. The engine is fed
        as rows come free, so that its queue, made for servers, never overflows."""
        core = self.core
        if core.sleeper.resting:
            raise Conflict("the engine is asleep: call wake_up", code="asleep")
        feed = _Feed(wanted, self.info.max_running_requests)
        try:
            while not feed.is_done:
                updates = [update for request in feed.new_ones() for update in core.add(request)]
                updates += core.step()
                if (contents := core.sleeper.contents) is not None:
                    contents.note(updates)
                if core.stuck:
                    core.scheduler.queues.constraints.wait(STUCK_WAIT_S)
                yield from feed.collected(updates)
        finally:
            # Interrupted: requests that still run would continue in the next call.
            for request_id in feed.live:
                core.abort(request_id)


class _Feed:
    """The requests of one call, of which at most `most` are in the engine (`live`), and their updates so far."""

    def __init__(self, wanted: Iterator[_Asked], most: int) -> None:
        self._wanted, self._most = wanted, most
        self._is_empty = False
        self._kept: dict[int, Update] = {}
        self.live: dict[int, _Asked] = {}

    @property
    def is_done(self) -> bool:
        return self._is_empty and not self.live

    def new_ones(self) -> Iterator[AddRequest]:
        """Yield the requests that the engine may take now."""
        while not self._is_empty and len(self.live) < self._most:
            one = next(self._wanted, None)
            if one is None:
                self._is_empty = True
                return
            self.live[one.request.request_id] = one
            yield one.request

    def collected(self, updates: list[Update]) -> Iterator[tuple[_Asked, Update]]:
        """Yield the updates of streams as they come, and those of other requests merged once they end."""
        for update in updates:
            request_id = update.request_id
            if request_id not in self.live:
                continue  # of a call that was interrupted
            one, earlier = self.live[request_id], self._kept.pop(request_id, None)
            merged = update if earlier is None else merge(earlier, update)
            if update.finish is not None:
                del self.live[request_id]
            elif not one.wants_each:
                self._kept[request_id] = merged
                continue
            yield one, merged


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request, and whose output it is, or whose place."""

    request: AddRequest
    writing: Writing | None
    index: int

    @property
    def wants_each(self) -> bool:
        return self.writing is not None and self.writing.wants_each


@dataclass(frozen=True, slots=True)
class _Source:
    core: EngineCore
    request_id: int

    def abort(self) -> None:
        """Abort the request. Its last update comes with those of the next step."""
        self.core.scheduler.abort(self.request_id)


def _raise_failures(outputs: list[RequestOutput], wanted: bool) -> None:
    failures = {place: output.error for place, output in enumerate(outputs) if output.error is not None}
    if failures and wanted:
        raise GenerationError(failures, outputs) from next(iter(failures.values()))


class _Bar:
    """On standard error: how many prompts are done, of how many if that is known, and tokens per second."""

    def __init__(self, what: str, total: int | None, *, shown: bool) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        rate = TextColumn("{task.fields[rate]}")
        self._progress = Progress(*columns, rate, console=Console(stderr=True), disable=not shown or total == 0)
        self._task = self._progress.add_task(what, total=total, rate="")
        self._num_tokens = 0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def show(self, num_tokens: int, *, done: bool) -> None:
        """Add tokens to the bar; `done`: they complete a prompt."""
        if self._progress.disable:
            return
        self._num_tokens += num_tokens
        elapsed = self._progress.tasks[0].elapsed
        rate = f"{self._num_tokens / elapsed:.0f} tok/s" if elapsed else ""
        self._progress.update(self._task, advance=int(done), rate=rate)
