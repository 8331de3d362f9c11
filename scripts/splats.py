"""A plug-in of mypy: in the package, `**values` fills named parameters only from keys that are declared.

mypy does not compare the keys of a `dict[str, Any]` with the names of parameters, so that a wrong name is found only in
the call. Allowed are a `TypedDict`; `values_of(base)` for a class that inherits from that of `base`; the keywords of a
`ParamSpec`; and a function that itself has `**options`. mypy does not show a plug-in the calls of a class that is a
value, as `cls(**values)`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from mypy.errorcodes import ErrorCode
from mypy.nodes import ARG_STAR2, CallExpr, Expression
from mypy.options import Options
from mypy.plugin import CheckerPluginInterface, FunctionSigContext, MethodSigContext, Plugin
from mypy.plugins.default import DefaultPlugin
from mypy.types import FunctionLike, Instance, Overloaded, ParamSpecType, ProperType, TypedDictType, get_proper_type

Context = FunctionSigContext | MethodSigContext
_VALUES_OF: Final = "forebay.base.values.values_of"
SPLAT: Final = ErrorCode("splat", "The keys of a dictionary that fills named parameters are not declared", "Forebay")


class SplatPlugin(Plugin):
    """Reports the splats of calls, and leaves every signature as it is."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._default = DefaultPlugin(options)  # whose hooks this one would hide

    def get_function_signature_hook(self, fullname: str) -> Callable[[FunctionSigContext], FunctionLike]:
        """Return the check of a function's calls."""
        return partial(_check, self._default.get_function_signature_hook(fullname))

    def get_method_signature_hook(self, fullname: str) -> Callable[[MethodSigContext], FunctionLike]:
        """Return the check of a method's calls."""
        return partial(_check, self._default.get_method_signature_hook(fullname))


def _check(default: Callable[[Any], FunctionLike] | None, context: Context) -> FunctionLike:
    signature = context.default_signature if default is None else default(context)
    call, checker = context.context, context.api
    if not isinstance(call, CallExpr) or ARG_STAR2 not in call.arg_kinds or not checker.path.startswith("forebay/"):
        return signature
    callee = signature if default else get_proper_type(checker.get_expression_type(call.callee))
    if _has_keywords(callee):
        return signature
    for kind, argument in zip(call.arg_kinds, call.args, strict=True):
        if kind == ARG_STAR2 and not _is_declared(argument, signature, checker):
            checker.fail("The keys are not declared: pass them by name, or as a TypedDict", argument, code=SPLAT)
    return signature


def _is_declared(argument: Expression, signature: FunctionLike, checker: CheckerPluginInterface) -> bool:
    values = get_proper_type(checker.get_expression_type(argument))
    if not isinstance(argument, CallExpr) or getattr(argument.callee, "fullname", "") != _VALUES_OF:
        return isinstance(values, TypedDictType | ParamSpecType)
    base = get_proper_type(checker.get_expression_type(argument.args[0]))
    made = get_proper_type(signature.items[0].ret_type)
    return isinstance(base, Instance) and isinstance(made, Instance) and made.type.has_base(base.type.fullname)


def _has_keywords(callee: ProperType) -> bool:
    """Return whether the function, or one of its overloads, has `**options`."""
    items = callee.items if isinstance(callee, Overloaded) else [callee]
    return any(getattr(item, "is_kw_arg", False) for item in items)


def plugin(version: str) -> type[Plugin]:
    """Return the plug-in, as mypy asks for it."""
    return SplatPlugin
