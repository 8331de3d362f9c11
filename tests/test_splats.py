"""The plug-in of mypy that finds dictionaries without declared keys where they fill named parameters."""

from __future__ import annotations

from mypy.build import BuildSource, build
from mypy.options import Options

from scripts import splats

SOURCE = """
from dataclasses import dataclass, replace
from forebay.base.values import values_of
from typing import Any, Callable, ParamSpec, TypedDict, Unpack
P = ParamSpec("P")
class Values(TypedDict):
    a: int
    b: str
@dataclass
class Base:
    a: int
    b: str
@dataclass
class Wide(Base):
    c: int
def free(**options: Any) -> None: ...
def typed(**options: Unpack[Values]) -> Base:
    return Base(**options)
def forwarded(**options: Any) -> Base:
    return Base(**options)  # refused
def wrapped(function: Callable[P, int]) -> Callable[P, int]:
    def inner(*args: P.args, **kwargs: P.kwargs) -> int:
        return function(*args, **kwargs)
    return inner
class Object:
    def method(self, a: int, b: str) -> None: ...
def calls(values: Values, bag: dict[str, Any], numbers: dict[str, int], base: Base, wide: Wide, own: Object) -> None:
    Base(**values)
    Base(**bag)  # refused
    Wide(**bag, c=1)  # refused
    Wide(**values_of(base), c=1)
    Base(**values_of(wide))  # refused
    replace(base, **bag)  # refused
    own.method(**values)
    own.method(**bag)  # refused
    free(**bag)
    bag.update(a=1, **numbers)
    values |= {"a": 1}
"""


FILES = {
    "forebay/__init__.py": "",
    "forebay/base/__init__.py": "",
    "forebay/base/values.py": "from typing import Any\ndef values_of(value: object) -> dict[str, Any]: ...",
    "forebay/module.py": SOURCE,
    "tests/helper.py": "from forebay.module import Base\ndef make(**others: int) -> Base:\n    return Base(**others)\n",
}


def test_splat_without_declared_keys_is_refused_in_the_package() -> None:
    options = Options()
    options.incremental, options.plugins = False, [splats.__file__]
    options.config_file = "pyproject.toml"  # without one mypy loads no plug-in
    sources = [
        BuildSource(path, path.removesuffix(".py").removesuffix("/__init__").replace("/", "."), text)
        for path, text in FILES.items()
    ]
    found = [line.split(":") for line in build(sources, options).errors if line.endswith("[splat]")]
    lines = [number for number, line in enumerate(SOURCE.splitlines(), 1) if line.endswith("# refused")]
    assert [(path, int(line)) for path, line, *_ in found] == [("forebay/module.py", line) for line in lines]
