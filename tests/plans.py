"""Plans by the names of their columns, whatever part these are in."""

from __future__ import annotations

from typing import Any

from msgspec.structs import fields, replace

from forebay.base.parts import Part
from forebay.requests.step_plan import StepPlan

EMPTY_PARTS = {field.name: field.default for field in fields(StepPlan) if isinstance(field.default, Part)}
EMPTY_KINDS = {field.name: field.default for field in fields(EMPTY_PARTS["kinds"])}


def plan_of(**values: Any) -> StepPlan:
    return StepPlan(**_by_part(EMPTY_PARTS, values))


def changed(plan: StepPlan, **values: Any) -> StepPlan:
    """The plan with other values in some columns."""
    return replace(plan, **_by_part({name: getattr(plan, name) for name in EMPTY_PARTS}, values))


def parts_of(plan: StepPlan) -> list[Any]:
    """The plan, its parts, and those about kinds of cache."""
    kinds = [getattr(plan.kinds, kind) for kind in EMPTY_KINDS]
    return [plan, *(getattr(plan, field) for field in EMPTY_PARTS), *kinds]


def column(plan: StepPlan, name: str) -> Any:
    for part in parts_of(plan):
        if name in part.__struct_fields__:
            return getattr(part, name)
    raise KeyError(name)


def _by_part(parts: dict[str, Part], values: dict[str, Any]) -> dict[str, Any]:
    kinds = {kind: getattr(parts["kinds"], kind) for kind in EMPTY_KINDS}
    if any(field in values for part in kinds.values() for field in part.__struct_fields__):
        taken = {field for part in kinds.values() for field in part.__struct_fields__}
        own = {field: value for field, value in values.items() if field in taken}
        values = {field: value for field, value in values.items() if field not in taken}
        values["kinds"] = replace(parts["kinds"], **_of_kinds(kinds, own))
    for name, part in parts.items():
        if name == "kinds":
            continue
        own = {field: values[field] for field in part.__struct_fields__ if field in values}
        values = {field: value for field, value in values.items() if field not in own}
        if own:
            values[name] = replace(part, **own)
    return values


def _of_kinds(kinds: dict[str, Part], values: dict[str, Any]) -> dict[str, Part]:
    of = {
        kind: {field: values[field] for field in part.__struct_fields__ if field in values}
        for kind, part in kinds.items()
    }
    return {kind: replace(kinds[kind], **own) for kind, own in of.items() if own}
