"""J-2: what must not be in the tree, looked for in the syntax and not in the text."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.imports import nodes_of

ROOT = Path(__file__).parent.parent
TREES = ("forebay", "scripts", "benchmarks")

BANNED_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
BANNED_CALLS = {"eval", "exec", "hash", "torch.load", "yaml.load", "jinja2.Environment", "Environment", "os.system"}
BANNED_KEYWORDS = {"shell", "trust_remote_code"}
BANNED_TEXTS = ("tcp://*", "0.0.0.0")
# Modules that read what a stranger wrote: there an assertion is a crash, or with -O no check at all.
INPUT_MODULES = (
    "forebay/server/",
    "forebay/http/",
    "forebay/config/",
    "forebay/formats/",
    "forebay/text/",
    "forebay/engine/channel.py",
)
# A text without any of these has no finding, but for assertions, and is not parsed.
SUSPECT = re.compile(
    rf"\b({'|'.join(sorted(BANNED_MODULES | BANNED_KEYWORDS))})\b|_pyobj|{'|'.join(map(re.escape, BANNED_TEXTS))}"
    rf"|\b({'|'.join(sorted(name.rpartition('.')[2] for name in BANNED_CALLS))})\s*\("
)

# Each line reviewed: (file, finding). At most three.
ALLOWED = {
    ("forebay/http/security.py", "text 0.0.0.0"),  # the set of addresses that are refused as a name
}


def findings(source: str, *, reads_input: bool) -> Iterator[str]:
    if not SUSPECT.search(source) and not (reads_input and re.search(r"\bassert\b", source)):
        return
    nodes = nodes_of(source)
    documentation = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        match node:
            case ast.Import(names=names):
                yield from (f"import {a.name}" for a in names if a.name.partition(".")[0] in BANNED_MODULES)
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in BANNED_MODULES:
                yield f"import {module}"
            case ast.Call(func=function, keywords=keywords):
                name = ast.unparse(function)
                if name in BANNED_CALLS or name.endswith("_pyobj"):
                    yield f"call {name}"
                yield from (f"keyword {k.arg}" for k in keywords if k.arg in BANNED_KEYWORDS and not is_false(k.value))
            case ast.Constant(value=str(text)) if id(node) not in documentation:
                yield from (f"text {banned}" for banned in BANNED_TEXTS if banned in text)
            case ast.Assert() if reads_input:
                yield "assert"


def is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "def f():\n    from joblib import load",
        "eval('1')",
        "exec(code)",
        "torch.load(path)",
        "socket.send_pyobj(x)",
        "yaml.load(text)",
        "jinja2.Environment()",
        "run(command, shell=True)",
        "f(trust_remote_code=flag)",
        "bind('tcp://*:5')",
        "host = '0.0.0.0'",
        "key = hash(tokens)",
        "assert x",
    ],
)
def test_each_banned_thing_is_found(source: str) -> None:
    assert list(findings(source, reads_input=True))


@pytest.mark.parametrize(
    "source", ["run(command, shell=False)", "model.eval()", "'''not 0.0.0.0'''", "hashlib.sha256()"]
)
def test_what_only_looks_like_it_is_not(source: str) -> None:
    assert not list(findings(source, reads_input=True))


def test_the_tree_has_nothing_banned() -> None:
    found = set()
    for path in (path for tree in TREES for path in sorted((ROOT / tree).rglob("*.py"))):
        name = str(path.relative_to(ROOT))
        found |= {(name, what) for what in findings(path.read_text(), reads_input=name.startswith(INPUT_MODULES))}
    assert found == ALLOWED
    assert len(ALLOWED) <= 3
