"""The formats that models are trained on, by name: the markers of each, and the reader of its calls."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from forebay.text.answers import calls
from forebay.text.answers.calls import Body
from forebay.text.answers.gemma_calls import TEXT_MARK, gemma_calls
from forebay.text.answers.tagged_calls import Tagged

_CALL_ID: Final = "call{:05}"  # nine letters and digits are all that some templates take


@dataclass(frozen=True, slots=True)
class CallFormat:
    """Calls follow one of `begins`, anywhere; with `bare` they may also begin an answer without a marker, if they name
    a tool of the request. `before` may come between marker and call, and `after` behind a call; `inside` are further
    markers. With `own` calls also begin anywhere in text without a marker: `in_text` (or `body`) reads them there, and
    they must name a tool of the request. `layout` is never text. `call_id` are the ids that the model was trained on,
    by a call's number. `tools_mark` is the marker with which the model is instructed to call, if it is not one of
    `begins`. With `named` calls begin, without a marker, with the name of a tool, alone on a line.
    """

    name: str
    body: Body
    begins: tuple[str, ...] = ()
    before: str = ""
    after: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()
    bare: str = ""
    own: tuple[str, ...] = ()
    in_text: Body | None = None
    layout: tuple[str, ...] = ()
    call_id: str = _CALL_ID
    tools_mark: str = ""
    named: bool = False

    def of_tools(self, tools: Iterable[str]) -> CallFormat:
        """Return the format in which these tools are called."""
        return replace(self, own=(*self.own, *(f"{name}\n" for name in tools))) if self.named else self

    @property
    def may_be_bare(self) -> bool:
        """Return whether an answer may begin with a call without a marker."""
        return self.named or self.bare != ""

    @property
    def spellings(self) -> tuple[str, ...]:
        """All that must be seen in the text for it."""
        return tuple(filter(None, (*self.begins, self.before, *self.after, *self.inside, *self.layout)))

    @property
    def marks(self) -> tuple[str, ...]:
        """Return what calls begin with, except single characters: those are common in a thought."""
        return (*self.begins, *(word for word in self.own if len(word) > 1))


@dataclass(frozen=True, slots=True)
class ThinkTags:
    """The pair of tags around a model's reasoning; `label` may follow the first. `layout` is what such a model writes
    around the answer behind it, and is never text."""

    name: str
    opens: str
    closes: str
    label: str = ""
    layout: tuple[str, ...] = ()

    @property
    def spellings(self) -> tuple[str, ...]:
        return (self.opens, self.closes, *self.layout)

    @property
    def ends(self) -> tuple[str, ...]:
        """Return the markers that end the thinking: the closing tag, and heads of the messages behind it."""
        return (self.closes, *(word for word in self.layout if word.startswith("<|")))


_ARG_TAGS: Final = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_V3: Final = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
_DSML: Final = Tagged(
    '<｜DSML｜invoke name="', ('">',), '<｜DSML｜parameter name="', '" string="false">', "", "</｜DSML｜parameter>",
    "</｜DSML｜invoke>", text_end='" string="true">',
)  # fmt: skip
_DSML_OUTER: Final = ("function_calls", "tool_calls")  # of V3.2 and of V4
_SOLAR: Final = ("<|tool_call:begin|>", "<|tool_call:name|>", "<|tool_call:args|>", "<|tool_call:end|>")
_SOLAR_LAYOUT: Final = ("<|begin|>assistant", "<|content|>", "<|end|>", "<|flush|>")
_COHERE_LAYOUT: Final = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
CITING: Final = frozenset({"cohere", "command_r"})  # formats of models that mark what a text is taken from
_K2: Final = (
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_argument_begin|>",
)


def _dsml(name: str, *outer: str) -> CallFormat:
    """Return the format whose calls are within the first of `outer`; the others are read as well."""
    begins, after = (tuple(f"<{slash}｜DSML｜{word}>" for word in outer) for slash in ("", "/"))
    return CallFormat(name, _DSML, begins=begins, after=after, own=(_DSML.opens,))


def _hy3(suffix: str) -> CallFormat:
    """Return the format of Hy3, whose tags end with a suffix in the published models."""
    key, value = (f"<arg_key{suffix}>", f"</arg_key{suffix}>"), (f"<arg_value{suffix}>", f"</arg_value{suffix}>")
    name_end, call_end = f"<tool_sep{suffix}>", f"</tool_call{suffix}>"
    return CallFormat(
        "hy_v3_opensource" if suffix else "hy_v3",
        Tagged("", (name_end,), *key, *value, call_end),
        begins=(f"<tool_calls{suffix}>",),
        before=f"<tool_call{suffix}>",
        after=(f"</tool_calls{suffix}>",),
        inside=(name_end, *key, *value, call_end),
    )


CALL_FORMATS: Final = {
    each.name: each
    for each in (
        CallFormat("hermes", calls.objects, begins=("<tool_call>",), after=("</tool_call>",)),
        CallFormat("granite", calls.objects, begins=("<|tool_call|>", "<function_call>", "<tool_call>")),
        CallFormat("hunyuan", calls.objects, begins=("<tool_calls>",), after=("</tool_calls>",)),
        CallFormat("nemotron", calls.objects, begins=("<TOOLCALL>",), after=("</TOOLCALL>",)),
        CallFormat(
            "gigachat3",
            calls.objects,
            begins=("function call<|role_sep|>", "<|function_call|>"),
            inside=("<|role_sep|>",),
            layout=("<|message_sep|>",),
        ),
        CallFormat(
            "cohere",
            calls.Objects("tool_name", ("parameters",)),
            begins=("<|START_ACTION|>",),
            after=("<|END_ACTION|>",),
            layout=_COHERE_LAYOUT,
        ),
        CallFormat(
            "command_r",
            calls.Objects("tool_name", ("parameters",)),
            begins=("Action: ```json", "Action:```json"),
            after=("```",),
        ),
        CallFormat("apertus", calls.by_name, begins=("<|tools_prefix|>",), after=("<|tools_suffix|>",)),
        CallFormat(
            "internlm", calls.objects, begins=("<|action_start|>",), before="<|plugin|>", after=("<|action_end|>",)
        ),
        CallFormat("phi4_mini", calls.rest_of_list, begins=("functools[",), tools_mark="<|tool|>"),
        CallFormat(
            "longcat",
            calls.list_or(
                Tagged(
                    "",
                    ("<longcat_arg_key>", "</longcat_tool_call>"),
                    "<longcat_arg_key>",
                    "</longcat_arg_key>",
                    "<longcat_arg_value>",
                    "</longcat_arg_value>",
                    "</longcat_tool_call>",
                )
            ),
            begins=("<longcat_tool_call>",),
            after=("</longcat_tool_call>",),
            inside=("<longcat_arg_key>", "</longcat_arg_key>", "<longcat_arg_value>", "</longcat_arg_value>"),
        ),
        CallFormat(
            "solar_open",
            calls.Headed(rf"[^<]*{re.escape(_SOLAR[1])}(?P<name>[\w.\-/]+)", _SOLAR[2]),
            begins=("<|tool_calls|>", _SOLAR[0]),
            before=_SOLAR[0],
            after=(_SOLAR[3], "<|calls|>"),
            inside=_SOLAR[1:3],
            layout=_SOLAR_LAYOUT,
        ),
        _dsml("deepseek_v32", *_DSML_OUTER),
        _dsml("deepseek_v4", *_DSML_OUTER[::-1]),
        _hy3(""),
        _hy3(":opensource"),
        CallFormat("olmo3", calls.python_lines, begins=("<function_calls>",), after=("</function_calls>",)),
        CallFormat(
            "mimo",
            Tagged("<function=", (">",), "<parameter=", ">", "", "</parameter>", "</function>"),
            begins=("<tool_call>",),
            after=("</tool_call>",),
            own=("<function=",),
        ),
        CallFormat(
            "qwen3_coder",
            Tagged("<function=", (">",), "<parameter=", ">", "", "</parameter>", "</function>", lines=True),
            begins=("<tool_call>",),
            after=("</tool_call>",),
            own=("<function=",),
        ),
        CallFormat(
            "seed_oss",
            Tagged("<function=", (">",), "<parameter=", ">", "", "</parameter>", "</function>"),
            begins=("<seed:tool_call>",),
            after=("</seed:tool_call>",),
            own=("<function=",),
        ),
        CallFormat(
            "gemma4",
            gemma_calls,
            begins=("<|tool_call>",),
            after=("<tool_call|>", "<|tool_response>"),
            inside=(TEXT_MARK,),
        ),
        CallFormat(
            "glm45",
            Tagged("", ("<arg_key>", "</tool_call>"), *_ARG_TAGS, "</tool_call>"),
            begins=("<tool_call>",),
            inside=(*_ARG_TAGS, "</tool_call>"),
        ),
        CallFormat(
            "minimax_m2",
            Tagged('<invoke name="', ('">',), '<parameter name="', '">', "", "</parameter>", "</invoke>"),
            begins=("<minimax:tool_call>",),
            after=("</minimax:tool_call>",),
            own=('<invoke name="',),
        ),
        CallFormat(
            "mistral",
            calls.list_or(calls.Headed(r"(?P<name>[\w.\-/]+?)(?:\s*\[CALL_ID\].*)?", "[ARGS]", or_brace=True)),
            begins=("[TOOL_CALLS]",),
            inside=("[ARGS]", "[CALL_ID]"),
            tools_mark="[AVAILABLE_TOOLS]",
        ),
        CallFormat(
            "deepseek_v3",
            calls.Headed(r"function<｜tool▁sep｜>(?P<name>[\w.\-/]+)", "\n```json\n"),
            begins=_V3[:2],
            before=_V3[1],
            after=("```", *_V3[2:]),
            inside=("<｜tool▁sep｜>",),
        ),
        CallFormat(
            "deepseek_v31",
            calls.Headed(r"(?P<name>[\w.\-/]+)", "<｜tool▁sep｜>"),
            begins=_V3[:2],
            before=_V3[1],
            after=_V3[2:],
            inside=("<｜tool▁sep｜>",),
        ),
        CallFormat(
            "kimi_k2",
            calls.Headed(r"(?:functions\.)?(?P<name>[\w.\-/]+?)(?::\d+)?", _K2[4]),
            begins=_K2[:2],
            before=_K2[1],
            after=_K2[2:4],
            inside=_K2[4:],
            call_id="functions.{name}:{}",
        ),
        CallFormat(
            "lfm2",
            calls.python_or_objects,
            begins=("<|tool_call_start|>",),
            after=("<|tool_call_end|>",),
            tools_mark="<|tool_list_start|>",
        ),
        CallFormat(
            "pythonic", calls.python, begins=("<|python_start|>",), after=("<|python_end|>",), bare="[", own=("[",)
        ),
        CallFormat(
            "llama3_json",
            calls.objects,
            begins=("<|python_tag|>",),
            bare="{",
            own=("{",),
            in_text=calls.named_objects,
        ),
        CallFormat(
            "xlam",
            calls.objects,
            begins=("[TOOL_CALLS]", "<tool_call>"),
            after=("</tool_call>", "```"),
            bare="[",
            own=("[", "```json"),
            in_text=calls.listed_in_text,
        ),
        CallFormat(
            "glm4",
            calls.name_and_object,
            in_text=calls.named_line,
            layout=("<|assistant|>",),
            tools_mark="在调用上述函数时，请使用 Json 格式",
            named=True,
        ),
    )
}
THINK_TAGS: Final = {
    each.name: each
    for each in (  # of two with the same tags, the first one whose layout is written
        ThinkTags("hunyuan", "<think>", "</think>", layout=("<answer>", "\n</answer>", "</answer>")),
        ThinkTags("ernie45", "<think>", "</think>", layout=("<response>", "\n</response>", "</response>")),
        ThinkTags("think", "<think>", "</think>"),
        ThinkTags("mistral", "[THINK]", "[/THINK]"),
        ThinkTags("seed_oss", "<seed:think>", "</seed:think>"),
        ThinkTags("gemma4", "<|channel>", "<channel|>", label="thought"),
        ThinkTags("granite", "Here is my thought process:", "Here is my response:"),
        ThinkTags("cohere", "<|START_THINKING|>", "<|END_THINKING|>", layout=_COHERE_LAYOUT),
        ThinkTags("solar_open", "<|think|>", "<|end|>", layout=_SOLAR_LAYOUT),
        ThinkTags("longcat", "<longcat_think>", "</longcat_think>"),
        ThinkTags("hy_v3_opensource", "<think:opensource>", "</think:opensource>"),
        ThinkTags("apertus", "<|inner_prefix|>", "<|inner_suffix|>"),
    )
}
CHANNELS: Final = "gpt_oss"
DECLARED: Final = "declared"  # by the checkpoint, in its response_template
CHANNEL_SPELLINGS: Final = (
    "<|channel|>",
    "<|start|>",
    "<|message|>",
    "<|constrain|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
)
CALL_PARSERS: Final = (*CALL_FORMATS, CHANNELS)
REASONING_PARSERS: Final = (*THINK_TAGS, CHANNELS)


def _by_name(names: Mapping[str, str]) -> dict[str, str]:
    return {name: ours for ours, theirs in names.items() for name in theirs.split()}


# What other engines call them.
CALL_NAMES: Final = _by_name(
    {
        "hermes": "qwen qwen25 qwen3 qwen3_json granite4 ernie45 trinity",
        "granite": "granite-20b-fc",
        "apertus": "apertus2509",
        "hunyuan": "hunyuan_a13b jamba",
        "cohere": "cohere_command3 cohere_command4",
        "internlm": "interns1",
        "phi4_mini": "phi4_mini_json",
        "nemotron": "nemotron_json llama_nemotron_json",
        "gigachat3": "gigachat",
        "qwen3_coder": "qwen3_xml step3p5 nanbeige",
        "llama3_json": "llama3 llama4_json",
        "pythonic": "llama4_pythonic",
        "deepseek_v3": "deepseekv3",
        "deepseek_v31": "deepseekv31",
        "deepseek_v32": "deepseekv32",
        "deepseek_v4": "deepseekv4",
        "glm45": "glm glm47 ling3 poolside_v1 spark25",
        "minimax_m2": "minimax minimax-m2",
        CHANNELS: "gpt-oss openai",
    }
)
DECLARING_NAMES: Final = ("hf", "response_template")  # of parsers that read what checkpoints declare: `auto` does
REASONING_NAMES: Final = _by_name(
    {
        "think": "deepseek_r1 deepseek-r1 deepseek_v3 deepseek-v3 deepseek_v31 deepseek_v4 deepseek-v4 deepseek_v41 "
        "deepseek-v41 qwen3 qwen3-thinking glm45 glm47 ling3 kimi_k2 minimax_m2 minimax mimo olmo3 hy_v3 exaone4 step3 "
        "step3p5 nemotron_v3 nemotron_3 granite_thinking_parser holo2 interns1 gigachat35 dots nanbeige poolside_v1",
        "apertus": "apertus2509",
        "hunyuan": "hunyuan_a13b",
        "cohere": "cohere_command3 cohere_command4",
        CHANNELS: "gpt-oss openai_gptoss",
    }
)


def call_id_of(calls: str | None) -> str:
    """A pattern of a number and a name."""
    return CALL_FORMATS[calls].call_id if calls in CALL_FORMATS else _CALL_ID
