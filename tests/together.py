"""One collected case for many values: all that fail are reported."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

Test = Callable[..., None]


def together(names: str, values: Iterable[Any]) -> Callable[[Test], Test]:
    """Run a test for each value inside one case: as `pytest.mark.parametrize`, where a case of its own costs more than
    the test does.

    Fixtures are made once, for all values. Raises an ExceptionGroup of all failures, each of which names its value.
    """
    arguments = [name.strip() for name in names.split(",")]
    cases = [value if len(arguments) > 1 else (value,) for value in values]

    def decorate(test: Test) -> Test:
        signature = inspect.signature(test)
        fixtures = [parameter for name, parameter in signature.parameters.items() if name not in arguments]

        @functools.wraps(test)
        def every(**given: Any) -> None:
            failures = []
            for case in cases:
                chosen = dict(zip(arguments, case, strict=True))
                try:
                    test(**given, **chosen)
                except Exception as error:
                    error.add_note(f"of {chosen!r}")
                    failures.append(error)
            if failures:
                raise ExceptionGroup(f"{len(failures)} of {len(cases)} cases of {test.__name__} fail", failures)

        every.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]
        return every

    return decorate
