"""What documentation mentions in backticks is there: in `docs/`, the README and the package's docstrings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.cli.commands import COMMANDS
from tests.mentions import Tree, missing

ROOT = Path(__file__).parent.parent
MENTION = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
ELSEWHERE = {"coming-from.md", "not-supported.md"}  # whole pages about what others have
FENCED = re.compile(r"```.*?```", re.DOTALL)

# Each reviewed: what belongs to others, or is a pattern and no name.
NOT_OURS = {
    *("llama-model.cpp", "llama-vocab.cpp", "ggml-common.h", "conversion/qwen.py", "deepseek.py", "docs/gguf.md"),
    *(
        "memcmp",
        "clear_page_erms",
        "CLOCK_BOOTTIME",
        "CLOCK_MONOTONIC",
        "/proc/PID/smaps_rollup",
        "perf",
        "nohup",
        "mypy",
    ),
    *("tensor.fill_(value)", "to.copy_(source)", "torch._meta_registrations", "Sec-Fetch-Site", "pylock.toml"),
    *(
        "experts.gate_up_proj",
        "experts.down_proj",
        "x_blocks",
        "x_scales",
        "tokenizer.ggml.token_type",
    ),  # names in files
    *("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"),  # OpenTelemetry's
    *("preserve_thinking", "clear_thinking"),  # variables of templates
    *("--context-length/--ctx-size/-c", "iB", "Ġthe", "dmesg", "uptime", "taskset"),
    *(
        "./folder",
        "./model.gguf",
        "./model-00001-of-00003.gguf",
        "org/name/file.gguf",
        "deploy/keys",
        "/var/cache/forebay",
    ),  # the reader's
}


def read_tree() -> tuple[Tree, dict[str, str]]:
    """Return the tree without the names of tests, and the source of each module of tests: they are half of all."""
    tree, tests = Tree(), dict[str, str]()
    for path in sorted(
        path
        for top in ("forebay", "tests", "benchmarks", "scripts", "examples")
        for path in (ROOT / top).rglob("*")
        if path.parent.name != "__pycache__"
    ):
        name = str(path.relative_to(ROOT))
        tree.files.add(name)
        if path.suffix == ".py":
            module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            if module.startswith("tests."):
                tests[module] = path.read_text()
            else:
                tree.add_python(module, path.read_text())
        elif path.suffix in (".cpp", ".h", ".js", ".html", ".css", ".toml"):
            tree.add_other(path.read_text())
    tree.files |= {
        str(path.relative_to(ROOT))
        for path in (*ROOT.glob("*"), *(ROOT / "docs").rglob("*"), *(ROOT / "deploy").glob("*"))
    }
    # A recipe's own files: tests/docs/test_recipes.py applies the diffs.
    tree.files |= set(re.findall(r"(?m)^\+\+\+ b/(\S+)", (ROOT / "docs" / "contributing.md").read_text()))
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    tree.commands |= {*(("make", name) for name in targets), *(("forebay", name) for name in COMMANDS)}
    return tree, tests


def pages(tree: Tree) -> Iterator[tuple[str, str]]:
    """The texts that mention, each with its place."""
    for path in (*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"):
        text = "" if path.name in ELSEWHERE else FENCED.sub("", path.read_text())
        if path.name == "glossary.md":  # its last column is what others call it
            text = "\n".join(line.rpartition("|")[0].rpartition("|")[0] or line for line in text.splitlines())
        yield str(path.relative_to(ROOT)), text
    yield from ((module, text) for module, text in tree.docstrings if module.partition(".")[0] == "forebay")


def gone(text: str, tree: Tree) -> list[str]:
    mentions = (mention for mention in MENTION.findall(text) if mention not in NOT_OURS)
    return [name for mention in mentions for name in missing(mention, tree)]


SMALL = Tree()
SMALL.add_python(
    "forebay.memory.pool",
    "class Base:\n    size: int\nclass Pool(Base):\n    def __init__(self): self.rows = 'a reason'\n"
    "    def take(self, pool: Pool, count=0):\n        'documentation'\n        point('pool.take')\n",
)
SMALL.texts |= {"--page-size", "config.json", "/health"}
SMALL.files |= {"forebay/memory/pool.py"}
SMALL.commands |= {("make", "test"), ("forebay", "serve")}


@pytest.mark.parametrize(
    "text",
    [
        *(
            "`Pools`",
            "`Pool.give`",
            "`pool.give()`",
            "`memory.pool.take`",
            "`pool.Pools`",
            "`size_of`",
            "`documentation`",
        ),
        *("`take(number=1)`", "`point('pool.give')`", "`[rows + 1, columns]`"),
        *("`memory/pools.py`", "`pools.py`", "`memory/pool/`", "`config.toml`", "`/healthy`"),
        *("`--page-length`", "`--page-length 16`", "`make tests`", "`forebay server`", "`python memory/pools.py`"),
    ],
)
def test_what_has_drifted_is_found(text: str) -> None:
    assert gone(text, SMALL)


@pytest.mark.parametrize(
    "text",
    [
        *("`Pool`", "`Pool.take`", "`pool.take()`", "`pool.rows`", "`Pool.size`", "`memory.pool.Pool`", "`reason`"),
        *("`take(count=1)`", "`point('pool.take')`", "`[rows + 1, size]`", "`take -> Pool`"),
        *("`memory/pool.py`", "`pool.py`", "`memory/`", "`forebay/*/pool.py`", "`config.json`", "`/health`"),
        *("`--page-size`", "`--page-size 16`", "`make test`", "`forebay serve --page-size 1`"),
        *("no code", "`1.5 KiB`", "```gone```", "`time.monotonic`", "`memcmp`"),
    ],
)
def test_what_is_there_is_not(text: str) -> None:
    assert not gone(text, SMALL)


@pytest.mark.long
def test_all_that_is_mentioned_is_there() -> None:
    tree, tests = read_tree()
    texts = [(place, text) for place, text in pages(tree) if gone(text, tree)]
    words = {word for _, text in texts for name in gone(text, tree) for word in re.findall(r"[\w-]+", name)}
    for module, source in tests.items():
        if words.intersection(re.findall(r"[\w-]+", source)):
            tree.add_python(module, source, with_texts=False)
    drifted = {(place, name) for place, text in texts for name in gone(text, tree)}
    assert drifted == set()
