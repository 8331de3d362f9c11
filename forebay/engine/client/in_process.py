"""An engine in this process, and the requests that a call runs in it."""

from __future__ import annotations

import sys
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
from forebay.engine.loop.core import EngineCore
from forebay.engine.loop.loop import STUCK_WAIT_S
from forebay.engine.stream import merge
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.updates import Update
from forebay.text.tokenizer import Tokenizer


class InProcess:
    """An engine in this process, until `close`: each call feeds it with requests and collects their updates.

    A subclass sets `_engine` and `info`, as `build_engine` returns them, and `tokenizer` and `_ids`, of requests.
    """

    _engine: EngineCore | None = None
    info: Ready
    tokenizer: Tokenizer
    _ids: Iterator[int]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.close()

    def close(self) -> None:
        """Give back all memory. Idempotent; nothing can be generated afterwards."""
        self._engine = None
        trim()

    @property
    def _core(self) -> EngineCore:
        if self._engine is None:
            raise Conflict("this LLM is closed: make another", code="closed")
        return self._engine

    def _write(
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
                writing = Writing(output, next(params), self.tokenizer)
                written.append(writing)
                asked = [
                    _Asked(self._request(output, how, places, adapter), writing, i)
                    for i, how in enumerate(writing.asked)
                ]
                writing.begin([_Source(self._core, one.request.request_id) for one in asked])
                yield from asked

        total = len(prompts) if isinstance(prompts, Sequence) else None
        with _Bar("generating", total, shown=shown) as bar, closing(self._run(requests())) as told:
            for one, update in told:
                writing = one.writing
                if writing is not None and writing.output.outputs[one.index].finish_reason is None:
                    writing.take(one.index, update)
                    bar.show(len(update.token_ids), done=writing.finished)
        found = [writing.output for writing in written]
        _raise_failures(found, raise_on_error)
        return found

    def _pool(
        self, outputs: list[RequestOutput], params: SamplingParams, shown: bool, adapter: str = ""
    ) -> list[Update]:
        """Return the results of pooled prompts; their `outputs` report the cache. Raises as `generate`."""
        self._check_adapter(adapter)
        requests = (self._request(output, params, [], adapter) for output in outputs)
        asked = [_Asked(request, None, place) for place, request in enumerate(requests)]
        told: dict[int, Update] = {}
        with _Bar("reading", len(outputs), shown=shown) as bar, closing(self._run(iter(asked))) as updates:
            for one, update in updates:
                told[one.index], output = update, outputs[one.index]
                output.cache = update.cache or output.cache
                output.error = update.failure.error if update.failure else None
                bar.show(len(output.prompt_token_ids), done=True)
        _raise_failures(outputs, True)
        return [told[place] for place in range(len(outputs))]

    def _check_adapter(self, name: str) -> None:
        """Raise NotFound for an adapter that is not loaded."""
        if name:
            self._core.scheduler.pools.adapters.named(name)

    def _request(self, output: RequestOutput, params: SamplingParams, places: list[int], adapter: str) -> AddRequest:
        return AddRequest(
            request_id=next(self._ids),
            prompt_token_ids=output.prompt_token_ids,
            params=params,
            resume_points=places,
            adapter=adapter,
        )

    def _run(self, wanted: Iterator[_Asked]) -> Generator[tuple[_Asked, Update], None, None]:
        """Yield the updates of each request: all at once when it ends, or as they come for streams. The engine is fed
        as rows come free, so that its queue, made for servers, never overflows."""
        if self._core.sleeper.resting:
            raise Conflict("the engine is asleep: call wake_up", code="asleep")
        live: dict[int, _Asked] = {}
        kept: dict[int, Update] = {}
        more = True
        try:
            while more or live:
                updates: list[Update] = []
                while more and len(live) < self.info.max_running_requests:
                    if (one := next(wanted, None)) is None:
                        more = False
                        break
                    live[one.request.request_id] = one
                    updates += self._core.add(one.request)
                updates += self._core.step()
                if (contents := self._core.sleeper.contents) is not None:
                    contents.heard(updates)
                if self._core.stuck:
                    self._core.scheduler.constraints.wait(STUCK_WAIT_S)
                for update in updates:
                    if (request_id := update.request_id) not in live:
                        continue  # of a call that was interrupted
                    one = live[request_id]
                    if update.finish is not None:
                        del live[request_id]
                    elif not one.wants_each:
                        kept[request_id] = merge(kept[request_id], update) if request_id in kept else update
                        continue
                    yield one, merge(kept.pop(request_id), update) if request_id in kept else update
        finally:
            # Interrupted: whoever still runs would go on in the next call.
            for request_id in live:
                self._core.abort(request_id)


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
