"""Whether a mutant of the scheduler or its memory changes a token: the mechanical test of what counts for the score.

    nice python -m tests.mutants tokens radix

The simulators run it with models whose next token is a hash of all that layers keep: KV, windows, states. No step
fails. Every check is taken out, but for those of an answer's tokens, log-probabilities and end. The mutant counts if an
answer is another one, if the engine raises or if it does not end. One that passes all seeds changes when or where
something is computed or kept, and no token.
"""

from __future__ import annotations

import argparse
import ast
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final
from unittest.mock import patch

from forebay.config.engine_config import Ledger
from tests.mutants.mutant import Mutant, Overlay, Stale, tried
from tests.simulation import oracles, simulator, sleeping, workload
from tests.simulation.workload import Traffic

AREAS: Final = ("memory/", "scheduler/")
CHECKED: Final = ("_take_token", "_check_finish")  # functions of `tests/simulation/oracles.py` that stay
SAME: Final = "same"
STALE: Final = "STALE"
NUM_SEEDS: Final = 150
_LIMIT_S: Final = 300  # of processor time
_ERRORS: Final = ("RunnerError", "Violation")
_CALM: Final = {"launch_fails": 0.0, "result_fails": 0.0, "not_finite": 0.0, "between_steps": 0.0, "fetch_lost": 0.0}
_RUNS: Final[Sequence[Callable[[int], object]]] = (
    simulator.run_seed,
    partial(simulator.run_seed, grammars=0.7),
    partial(simulator.run_seed, restricted=0.5, tiers=True, keeping=True),
    sleeping.run_seed,
)


class _Unchecked(ast.NodeTransformer):
    """Takes checks out of a simulator: what `require` is given is still evaluated."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return node if node.name in CHECKED else self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        return ast.Pass() if _called(node.exc) in _ERRORS else node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        call = node.value
        return ast.Expr(call.args[0]) if isinstance(call, ast.Call) and _called(call) == "require" else node


def _called(node: ast.expr | None) -> str:
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""


def unchecked(source: str) -> str:
    """Return a module of the simulators without its checks."""
    return ast.unparse(ast.fix_missing_locations(_Unchecked().visit(ast.parse(source))))


def _calm(traffic: Traffic) -> Traffic:
    return replace(traffic, faults=replace(traffic.faults, **_CALM))


@contextmanager
def _answers_alone() -> Iterator[None]:
    """Inside, no step fails, ledgers count, and the state of the scheduler is not looked at."""
    tiers, config, traffic = workload.with_tiers, workload.random_config, workload.random_traffic

    def calm_tiers(*args: Any) -> Any:
        found, load = tiers(*args)
        return found, _calm(load)

    def ignore(*args: Any) -> None: ...

    with ExitStack() as stack:
        for module in (simulator, sleeping):
            stack.enter_context(patch.object(module, "random_traffic", lambda *args: _calm(traffic(*args))))
            quiet = lambda *args: replace(config(*args), ledger=Ledger.COUNT)  # noqa: E731
            stack.enter_context(patch.object(module, "random_config", quiet))
        stack.enter_context(patch.object(simulator, "with_tiers", calm_tiers))
        for name in ("check", "check_cache", "check_drained"):
            stack.enter_context(patch.object(oracles.Oracles, name, ignore))
        yield


def first_change(seeds: Sequence[int], runs: Sequence[Callable[[int], object]] = _RUNS) -> str:
    """Return what differs with the first seed that changes something, "" if none does."""
    with _answers_alone():
        for seed in seeds:
            try:
                runs[seed % len(runs)](seed)
            except Exception as error:
                return f"seed {seed}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return ""


def outcome(num_seeds: int, overlay: Overlay, mutant: Mutant) -> str:
    """Return what changes with the mutant, `SAME`, or why it could not be tried."""
    try:
        with overlay.changed(mutant.file, mutant.text):
            return changed(overlay, num_seeds)
    except Stale as stale:
        return f"{STALE} {stale}"


def changed(overlay: Overlay, num_seeds: int) -> str:
    """Return what changes with the package of `overlay`, whose simulators lose their checks, or `SAME`."""
    for path in (overlay.root / "tests/simulation").glob("*.py"):
        path.write_text(unchecked(path.read_text()))
    done = overlay.python(["-m", "tests.mutants.tokens", str(num_seeds)], {"PYTHONPATH": str(overlay.root)}, None)
    if done.returncode == -signal.SIGXCPU:
        return "does not end"
    last = done.stdout.strip().rpartition("\n")[2]
    return (last or f"exit code {done.returncode}") if done.returncode else SAME


def main(arguments: Sequence[str], mutants: Sequence[Mutant]) -> int:
    """Print for each mutant of the scheduler and its memory what changes, or that nothing does."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants tokens", description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", metavar="WORD", help="only rules with it in their file or their words")
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS, help="how many are run before nothing changes")
    options = parser.parse_args(arguments)
    words = options.words or [""]
    chosen = [
        one for one in mutants if one.file.startswith(AREAS) and any(w in f"{one.file} {one.rule}" for w in words)
    ]
    for mutant, result in tried(chosen, partial(outcome, options.seeds), 1):
        print(f"{result:<44} | {mutant.rule}", flush=True)
    return 0


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CPU, (_LIMIT_S, _LIMIT_S + 1))
    found = first_change(range(int(sys.argv[1])))
    print(found)
    sys.exit(int(bool(found)))
