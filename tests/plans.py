"""Plans by the names of their columns, whatever part these are in."""

from __future__ import annotations

from typing import Any

from msgspec.structs import fields, replace

from forebay.requests.parts import Part
from forebay.requests.step_plan import StepPlan

EMPTY_PARTS = {field.name: field.default for field in fields(StepPlan) if isinstance(field.default, Part)}


def plan_of(**values: Any) -> StepPlan:
    return StepPlan(**_by_part(EMPTY_PARTS, values))


def changed(plan: StepPlan, **values: Any) -> StepPlan:
    """The plan with other values in some columns."""
    return replace(plan, **_by_part({name: getattr(plan, name) for name in EMPTY_PARTS}, values))


def column(plan: StepPlan, name: str) -> Any:
    for part in (plan, *(getattr(plan, field) for field in EMPTY_PARTS)):
        if name in part.__struct_fields__:
            return getattr(part, name)
    raise KeyError(name)


def _by_part(parts: dict[str, Part], values: dict[str, Any]) -> dict[str, Any]:
    for name, part in parts.items():
        own = {field: values[field] for field in part.__struct_fields__ if field in values}
        values = {field: value for field, value in values.items() if field not in own}
        if own:
            values[name] = replace(part, **own)
    return values
