"""Files of attention alone with Granite's multipliers."""

from __future__ import annotations

from forebay.families.base.architecture import Header


def attention_alone(header: Header) -> None:
    """Complete the configuration of a model without mixers. Raises ModelError for one without rotary embedding."""
    if header.own.get("rope.scaling.finetuned", True) is not True:
        raise header.wrong("a file of attention without rotary embedding is not supported")
    header.config["num_key_value_heads"] = header.kv_heads()
