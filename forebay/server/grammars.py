"""Checking grammars off the event loop."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from forebay.base.errors import InvalidRequest
from forebay.grammar.checking import GrammarChecks
from forebay.grammar.vocabulary import Vocabulary
from forebay.http.preparation import Client, Preparation
from forebay.http.workers import Workers
from forebay.requests.sampling_params import Grammar

NUM_THREADS: Final = 2  # a grammar that takes all the time it may does not hold up everybody else's


class GrammarWorkers:
    """Threads that check grammars, each with a process. A process that exceeds its limits is killed
    (`grammar.checking`). A grammar with a known result is answered without a process."""

    def __init__(self, preparation: Preparation, make_vocabulary: Callable[[], Vocabulary]) -> None:
        self._checks = GrammarChecks(make_vocabulary)
        self._workers = Workers(preparation.lane("grammar", NUM_THREADS))

    async def check(self, client: Client, grammar: Grammar, field: str) -> Grammar:
        """Check a grammar and return it, for an engine to compile. Raises InvalidRequest `grammar_invalid` that names
        the client's `field` and the fault, and what `Workers.run` raises."""
        try:
            if not self._checks.recall(grammar):
                await self._workers.run(client, partial(self._checks.check, grammar))
        except InvalidRequest as error:
            error.param = field
            raise
        return grammar

    def close(self) -> None:
        """End the threads once their current work is done."""
        self._workers.close()
