"""What the tree has, by name: to look up what documentation mentions in backticks."""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property

from tests.imports import nodes_of, syntax, walk

WORD = re.compile(r"[A-Za-z_]\w*")
PATH = re.compile(r"[\w.-]*(?:/[\w.*-]+)+/?|[\w-]+\.(?:py|md|h|cpp|js|html|css|toml|txt|gguf|json|jinja)")
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
COMMAND = re.compile(r"(make|forebay) ([a-z][\w-]*)")
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


@dataclass
class Tree:
    """Of the sources: every identifier, and what of them is a module's or a class's own."""

    names: set[str] = field(default_factory=set)
    texts: set[str] = field(default_factory=set)  # string constants, but for documentation
    modules: dict[str, set[str]] = field(default_factory=dict)  # by dotted name: what stands in it
    members: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))  # by the class's name
    bases: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    types: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))  # by the variable's name: annotations
    files: set[str] = field(default_factory=set)
    commands: set[tuple[str, str]] = field(default_factory=set)  # ("make", "test")
    docstrings: list[tuple[str, str]] = field(default_factory=list)  # behind the dotted name of their module

    def add_python(self, module: str, source: str, *, with_texts: bool = True) -> None:
        for derived in ("words", "flags", "_joined_texts", "_joined_files"):
            vars(self).pop(derived, None)
        tree, nodes = syntax(source), nodes_of(source)
        documentation = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        self.modules[module] = set(own_names(tree.body))
        documented = (node for node in nodes if isinstance(node, ast.Module | ast.ClassDef | FUNCTION))
        self.docstrings += [(module, text) for node in documented if (text := ast.get_docstring(node))]
        for node in nodes:
            match node:
                case ast.Constant(value=str(text)) if id(node) not in documentation and (
                    with_texts or text[:2] == "--"
                ):
                    self.texts.add(text)
                case ast.Name(id=name) | ast.Attribute(attr=name) | ast.keyword(arg=str(name)):
                    self.names.add(name)
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    self.names.add(name)
                case ast.arg(arg=name, annotation=annotation):
                    self._annotate(name, annotation)
                case ast.AnnAssign(target=ast.Name(id=name) | ast.Attribute(attr=name), annotation=annotation):
                    self._annotate(name, annotation)
                case ast.ClassDef(name=name, bases=bases):
                    self.names.add(name)
                    self.members[name] |= {*own_names(node.body), *assigned_to_self(node)}
                    self.bases[name] |= {base for node in bases for base in identifiers(node)}

    def add_other(self, source: str) -> None:
        """Add the words of a file in C++ or JavaScript, or of a configuration."""
        self.names |= set(WORD.findall(COMMENT.sub("", source)))

    def _annotate(self, name: str, annotation: ast.expr | None) -> None:
        self.names.add(name)
        if annotation is not None:
            self.types[name] |= set(identifiers(annotation))

    @cached_property
    def words(self) -> set[str]:
        """Identifiers, and words of texts: fields of messages and files are named there."""
        return self.names | {word for text in self.texts for word in WORD.findall(text)}

    @cached_property
    def flags(self) -> set[str]:
        return {flag for text in self.texts for flag in FLAG.findall(text)}

    @cached_property
    def _joined_texts(self) -> str:
        return "\0".join(self.texts)

    @cached_property
    def _joined_files(self) -> str:
        return "".join(f"/{file}\n" for file in self.files)

    def has_text(self, part: str) -> bool:
        return part in self._joined_texts

    def has_flag(self, flag: str) -> bool:
        return flag in self.flags or flag[2:].replace("-", "_") in self.texts

    def has_member(self, kind: str, name: str) -> bool:
        """Return whether a class or one of its bases has a member. Classes of one name are one, so bases may circle."""
        seen, left = {kind}, [kind]
        while left:
            kind = left.pop()
            if name in self.members.get(kind, ()):  # no entry is made for the name of a module
                return True
            bases = self.bases.get(kind, set())
            left += bases - seen
            seen |= bases
        return False

    def has_chain(self, parts: list[str]) -> bool:
        """`a.b.c`: a module's member, a class's, or that of a variable whose type is known."""
        if parts[0] in sys.stdlib_module_names and f"forebay.{parts[0]}" not in self.modules:
            return True
        if len(parts) == 1 or parts[0] == "self":
            return parts[-1] in self.words or self.is_module(parts)
        kinds = {kind for kind in (parts[0], *self.types.get(parts[0], ())) if kind in self.members}
        modules = [
            (names, cut)
            for module, names in self.modules.items()
            for cut in range(1, len(parts))
            if f".{module}".endswith("." + ".".join(parts[:cut]))
        ]
        if not kinds and not modules:
            return self.words.issuperset(parts)
        return (
            any(self.has_member(kind, parts[1]) for kind in kinds)
            or any(parts[cut] in names for names, cut in modules)
            or self.is_module(parts)
        )

    def is_module(self, parts: list[str]) -> bool:
        return any(f".{module}.".find("." + ".".join(parts) + ".") >= 0 for module in self.modules)

    def has_path(self, path: str) -> bool:
        """From any folder on; `*` stands for anything."""
        end = f"{path}*" if path.endswith("/") else path
        if not set("*?[") & set(end):
            return f"/{end}\n" in self._joined_files
        return any(fnmatchcase(f"/{file}", f"*/{end}") for file in self.files)


def own_names(body: Iterable[ast.stmt]) -> Iterator[str]:
    """What statements define at their own level, and in branches of it."""
    for node in body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Assign(targets=targets):
                yield from (name for target in targets for name in identifiers(target))
            case ast.AnnAssign(target=target):
                yield from identifiers(target)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                yield from (alias.asname or alias.name for alias in aliases)
            case ast.If(body=inner, orelse=orelse):
                yield from own_names([*inner, *orelse])


def assigned_to_self(tree: ast.AST) -> Iterator[str]:
    for node in walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def identifiers(tree: ast.AST) -> Iterator[str]:
    for node in walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name):
                yield name
            case ast.Constant(value=str(text)):
                yield from WORD.findall(text)  # an annotation in quotes


def missing(mention: str, tree: Tree) -> list[str]:
    """What of a text in backticks is not there. What is no name, path, flag or command is not looked for."""
    flags = [flag for flag in FLAG.findall(mention) if not tree.has_flag(flag)]
    if mention.startswith(("make ", "forebay ", "python ")) or flags:
        paths = [word for word in mention.split() if word.endswith(".py") and not tree.has_path(word)]
        command = COMMAND.match(mention)
        commands = [command[0]] if command and command.groups() not in tree.commands else []
        return [*flags, *paths, *commands]
    if PATH.fullmatch(mention) and (tree.has_path(mention) or tree.has_text(mention)):
        return []
    if PATH.fullmatch(mention) and "/" in mention:
        return [mention]
    try:
        expression = ast.parse(mention.replace("->", ",").replace("...", "0"), mode="eval")
    except SyntaxError:
        return []
    names = [name for name in chains(expression) if name not in tree.texts and not tree.has_chain(name.split("."))]
    return names + [text for text in constants(expression) if not tree.has_text(text)]


def constants(tree: ast.AST) -> Iterator[str]:
    """What is passed as text."""
    calls = (node for node in walk(tree) if isinstance(node, ast.Call))
    yield from (
        arg.value for call in calls for arg in call.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
    )


def chains(tree: ast.AST) -> Iterator[str]:
    """The longest `a.b.c` of an expression, and its keywords."""
    match tree:
        case ast.Attribute() if WORD.fullmatch(ast.unparse(tree).replace(".", "_")):
            yield ast.unparse(tree)
            return
        case ast.Name(id=name) | ast.keyword(arg=str(name)):
            yield name
    for node in ast.iter_child_nodes(tree):
        yield from chains(node)
