"""Every small change of a source file that could be a bug, found on its syntax tree."""

from __future__ import annotations

import ast
import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

_COMPARISONS: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OPERATORS: Final[dict[type[ast.operator], type[ast.operator]]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
_FUNCTIONS: Final = {"min": "max", "max": "min", "any": "all", "all": "any"}
_OF_TYPES: Final = {"TypeVar", "ParamSpec", "NewType"}
_SYMMETRIC: Final = {"min", "max"}  # their arguments exchanged say the same
_Node = TypeVar("_Node", ast.Compare, ast.BoolOp, ast.BinOp, ast.AugAssign, ast.BinOp | ast.AugAssign)
_LOGS: Final = {"debug", "info", "warning", "error", "exception"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """One change: bytes `start` to `end` of the UTF-8 source become `replacement`."""

    line: int
    operator: str
    start: int
    end: int
    replacement: str

    def apply(self, source: str) -> str:
        """Return `source` with this change. Raises SyntaxError if the result is no Python."""
        raw = source.encode()
        changed = (raw[: self.start] + self.replacement.encode() + raw[self.end :]).decode()
        compile(changed, "<mutant>", "exec")
        return changed

    def quote(self, source: str) -> str:
        """Return the text that this change replaces."""
        return source.encode()[self.start : self.end].decode()


def sites(source: str) -> list[Site]:
    """Return all changes of `source`, in the order of its lines.

    Texts that only people read are left alone: docstrings, annotations, messages of errors and logs, and assertions.
    So is the order of a tuple that is a set: the types of `except` and `isinstance`, and what `in` looks through.
    """
    finder = _Finder(source)
    finder.visit(ast.parse(source))
    return sorted(finder.found, key=lambda site: (site.start, site.end, site.operator))


class _Finder(ast.NodeVisitor):
    def __init__(self, source: str) -> None:
        self.found: list[Site] = []
        self._unordered: set[ast.expr] = set()  # tuples whose order says nothing
        self._source = source.encode()
        self._starts = [0, *itertools.accumulate(len(line) for line in self._source.splitlines(keepends=True))]

    # -- what is left alone -------------------------------------------------------------------------------------------

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_arg(self, node: ast.arg) -> None:
        return

    def visit_Assert(self, node: ast.Assert) -> None:
        return

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        return  # before Python 3.12 the places of what stands inside are not those of the file

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.visit(node.args)
        for statement in node.body:
            self.visit(statement)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:
            self.visit(statement)

    # -- statements ---------------------------------------------------------------------------------------------------

    def visit_Expr(self, node: ast.Expr) -> None:
        value = node.value.value if isinstance(node.value, ast.Await) else node.value
        if not isinstance(value, ast.Call):
            self.generic_visit(node)
            return
        self._delete(node)
        if not (isinstance(value.func, ast.Attribute) and value.func.attr in _LOGS):
            self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        self._delete(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._delete(node)
        self._operator(node)
        self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        if isinstance(node.targets[0], ast.Attribute | ast.Subscript):
            self._delete(node)
        self.visit(node.value)

    def visit_Delete(self, node: ast.Delete) -> None:
        self._delete(node)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.type is not None:
            self._unordered.add(node.type)
        self.generic_visit(node)

    def visit_Break(self, node: ast.Break) -> None:
        self._put(node, "continue instead of break", "continue")

    def visit_Continue(self, node: ast.Continue) -> None:
        self._put(node, "no continue", "pass")

    def visit_If(self, node: ast.If | ast.While | ast.IfExp) -> None:
        if not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            self._put(node.test, "negated condition", f"(not ({ast.unparse(node.test)}))")
            self.generic_visit(node)

    visit_While = visit_If
    visit_IfExp = visit_If

    # -- expressions --------------------------------------------------------------------------------------------------

    def visit_Compare(self, node: ast.Compare) -> None:
        def other(changed: ast.Compare) -> None:
            changed.ops[0] = _COMPARISONS[type(changed.ops[0])]()

        self._change(node, "another comparison", other)
        self._unordered.update(
            right for op, right in zip(node.ops, node.comparators, strict=True) if isinstance(op, ast.In | ast.NotIn)
        )
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        def other(changed: ast.BoolOp) -> None:
            changed.op = ast.Or() if isinstance(changed.op, ast.And) else ast.And()

        def without_last(changed: ast.BoolOp) -> None:
            changed.values.pop()

        self._change(node, "and for or, or for and", other)
        self._change(node, "the last part left out", without_last)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._put(node, "no not", f"({ast.unparse(node.operand)})")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self._operator(node)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._put(node, "the other bool", str(not node.value))
        elif isinstance(node.value, int):
            self._put(node, "another number", str(node.value + 1))
        elif isinstance(node.value, float):
            self._put(node, "another number", repr(node.value * 4 or 1.0))

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func.id if isinstance(node.func, ast.Name) else ""
        if function in _OF_TYPES:
            return
        if function == "isinstance":
            self._unordered.add(node.args[1])
        if function in _FUNCTIONS:
            self._put(node.func, "another function", _FUNCTIONS[function])
        plain = [argument for argument in node.args if not isinstance(argument, ast.Starred)]
        if len(node.args) > 1 and plain == node.args and function not in _SYMMETRIC:
            self._exchange(node.args[0], node.args[1], "arguments exchanged")
        named = [keyword for keyword in node.keywords if keyword.arg]
        for first, second in itertools.pairwise(named):
            self._exchange(first.value, second.value, "named arguments exchanged")
        self.generic_visit(node)

    def visit_Dict(self, node: ast.Dict) -> None:
        if all(node.keys):
            for first, second in itertools.pairwise(node.values):
                self._exchange(first, second, "values exchanged")
        self.generic_visit(node)

    def visit_Tuple(self, node: ast.Tuple) -> None:
        if isinstance(node.ctx, ast.Load) and len(node.elts) > 1 and node not in self._unordered:
            self._exchange(node.elts[0], node.elts[1], "places exchanged")
        self.generic_visit(node)

    # -- writing ------------------------------------------------------------------------------------------------------

    def _operator(self, node: ast.BinOp | ast.AugAssign) -> None:
        def other(changed: ast.BinOp | ast.AugAssign) -> None:
            changed.op = _OPERATORS[type(changed.op)]()

        parts = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.value,)
        if type(node.op) in _OPERATORS and not any(_is_text(part) for part in parts):
            self._change(node, "another operator", other)

    def _delete(self, node: ast.stmt) -> None:
        self._put(node, "statement left out", "pass")

    def _change(self, node: _Node, operator: str, change: Callable[[_Node], None]) -> None:
        changed = copy.deepcopy(node)
        change(changed)
        text = ast.unparse(changed)
        self._put(node, operator, text if isinstance(node, ast.stmt) else f"({text})")

    def _exchange(self, first: ast.expr, second: ast.expr, operator: str) -> None:
        (start, first_end), (second_start, end) = self._place(first), self._place(second)
        one, between, other = (
            self._source[start:first_end],
            self._source[first_end:second_start],
            self._source[second_start:end],
        )
        if one != other:
            self._found(first, operator, start, end, (other + between + one).decode())

    def _put(self, node: ast.expr | ast.stmt, operator: str, text: str) -> None:
        self._found(node, operator, *self._place(node), text)

    def _found(self, node: ast.expr | ast.stmt, operator: str, start: int, end: int, text: str) -> None:
        self.found.append(Site(line=node.lineno, operator=operator, start=start, end=end, replacement=text))

    def _place(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Return where a node starts and ends, in bytes of the source."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._starts[node.lineno - 1] + node.col_offset, self._starts[node.end_lineno - 1] + node.end_col_offset


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
