"""Grammars that a chat enforces on its answer: the form of it, calls that must be made, an end of the thinking."""

from __future__ import annotations

import json
import re
from dataclasses import replace

from forebay.grammar.answers import AnswerRules, answer_grammar
from forebay.grammar.lark import CallRule
from forebay.requests.sampling_params import Grammar, GrammarKind
from forebay.server.api.core.prompts import tail_of
from forebay.server.context import ServerContext
from forebay.server.protocol.requests import ChatRequest
from forebay.server.protocol.tools import AllowedTools, AnyTool, GrammarDefinition, TextTool


async def enforced_grammar(server: ServerContext, body: ChatRequest, prompt: list[int]) -> Grammar | None:
    """Build the grammar that constrains answers to `prompt`, in the formats of the model; None if unconstrained. Raises
    InvalidRequest `grammar_invalid` that names the client's field."""
    found, rules = server.model.answers, rules_of(body)
    for call in (call for call in rules.calls if call.enforced):
        schema = json.dumps({"type": "object", **call.parameters}, ensure_ascii=False)
        await server.grammars.check(server.client, Grammar(GrammarKind.JSON_SCHEMA, schema), call.field)
        if call.text:
            await server.grammars.check(server.client, Grammar(GrammarKind.LARK, call.text), call.field)
    if found.formats.thinking is not None:
        rules = replace(rules, opened=found.opens_thinking(tail_of(server.tokenizer, prompt)))
    grammar = answer_grammar(found.formats, server.tokenizer.table, rules)
    if grammar is None or grammar is rules.content:
        return grammar
    return await server.grammars.check(server.client, grammar, "tools" if rules.calls else "messages")


def rules_of(body: ChatRequest) -> AnswerRules:
    """But for where the thinking begins."""
    allowed, must_call = body.allowed_names, body.must_call
    named = allowed is not None and not isinstance(body.tool_choice, AllowedTools)
    tools = [(i, tool) for i, tool in enumerate(body.offered_tools) if allowed is None or tool.function.name in allowed]
    return AnswerRules(
        calls=[_call_rule(i, tool, enforced=must_call) for i, tool in tools],
        must_call=must_call,
        restricted=allowed is not None,
        one_call=named or body.parallel_tool_calls is False,
        content=next((asked.grammar for asked in body.grammars), None),
        max_thinking_tokens=body.max_thinking_tokens,
    )


def _call_rule(number: int, tool: AnyTool, *, enforced: bool) -> CallRule:
    """`enforced`: a tool must be called, whatever it says of `strict`."""
    function, field = tool.function, f"tools.{number}.function.parameters"
    if isinstance(tool, TextTool) and tool.grammar is not None:
        field = f"tools.{number}.custom.format.grammar.definition"
        return CallRule(function.name, function.parameters or {}, True, field, _as_lark(tool.grammar))
    return CallRule(function.name, function.parameters or {}, enforced or bool(function.strict), field)


def _as_lark(grammar: GrammarDefinition) -> str:
    if grammar.syntax == "lark":
        return grammar.definition
    pattern = re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\/", grammar.definition)  # a slash would end it
    return f"start: /{pattern}/".replace("\n", r"\n")
