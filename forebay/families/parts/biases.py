"""Sizes of heads that a null derives from other fields."""

from __future__ import annotations

from dataclasses import replace

from forebay.families.base.fields import Fields
from forebay.families.config.transformer import Defaults


def sized(fields: Fields, defaults: Defaults) -> Defaults:
    """Return the defaults of a type whose sizes of heads a null derives from other fields, instead of naming none."""
    head_dim = 0 if fields.is_null("head_dim") else defaults.head_dim
    return replace(defaults, head_dim=head_dim, kv_heads=fields.is_null("num_key_value_heads"))
