"""Forebay: an LLM serving engine whose memory can be trusted.

from forebay import LLM, SamplingParams
print(LLM().generate("The capital of France is", SamplingParams(max_tokens=8))[0].text)
"""

from __future__ import annotations

TYPE_CHECKING = False  # that of `typing`, whose import would be most of the time before Ctrl-C can be handled
if TYPE_CHECKING:
    from forebay.base.errors import GenerationError, InvalidRequest
    from forebay.base.package import __version__
    from forebay.engine.client.async_engine import AsyncEngine
    from forebay.engine.client.llm import LLM
    from forebay.engine.client.writing import CompletionOutput, RequestOutput, TextDelta
    from forebay.requests.sampling_params import Grammar, GrammarKind, SamplingParams

__all__ = [
    "LLM",
    "AsyncEngine",
    "CompletionOutput",
    "GenerationError",
    "Grammar",
    "GrammarKind",
    "InvalidRequest",
    "RequestOutput",
    "SamplingParams",
    "TextDelta",
    "__version__",
]

_HOMES = {
    "__version__": "forebay.base.package",
    "LLM": "forebay.engine.client.llm",
    "AsyncEngine": "forebay.engine.client.async_engine",
    "CompletionOutput": "forebay.engine.client.writing",
    "RequestOutput": "forebay.engine.client.writing",
    "TextDelta": "forebay.engine.client.writing",
    "GenerationError": "forebay.base.errors",
    "InvalidRequest": "forebay.base.errors",
    "Grammar": "forebay.requests.sampling_params",
    "GrammarKind": "forebay.requests.sampling_params",
    "SamplingParams": "forebay.requests.sampling_params",
}


def __getattr__(name: str) -> object:
    """Imported when asked for: the command line must answer before torch could be loaded."""
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'forebay' has no attribute {name!r}")
