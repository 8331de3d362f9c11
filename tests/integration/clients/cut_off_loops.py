"""Agent loops of openai-agents and pydantic-ai against a server: BASE MODEL, in an environment that has them.

Each loop's first call of a tool is cut off by a limit of tokens. The loop sends it back, with all that it has received,
and goes on. Prints for each loop how much it did: turns, or calls.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import agents
from agents.exceptions import MaxTurnsExceeded, ModelBehaviorError
from openai import AsyncOpenAI
from pydantic_ai import ModelSettings
from pydantic_ai.direct import model_request
from pydantic_ai.messages import (
    ModelMessage,
    ModelRequest,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.tools import ToolDefinition

BASE, MODEL = sys.argv[1:]
CUT_OFF = 22  # tokens: less than a call with its arguments has


def get_weather(city: str) -> str:
    """Say the weather of a city."""
    return f"It is sunny in {city}."


async def with_agents(kind: Any) -> int:
    client = AsyncOpenAI(base_url=f"{BASE}/v1", api_key="none", max_retries=0)
    agents.set_tracing_disabled(True)
    told: list[Any] = [{"role": "user", "content": "How is the weather in Paris?"}]
    turns = 0
    for max_tokens in (CUT_OFF, 120, 60):
        settings = agents.ModelSettings(
            tool_choice="required" if turns < 2 else "none", max_tokens=max_tokens, temperature=0.0
        )
        agent = agents.Agent(
            name="a",
            model=kind(MODEL, client),
            tools=[agents.function_tool(get_weather)],
            model_settings=settings,
            tool_use_behavior="stop_on_first_tool",
        )
        try:
            result = await agents.Runner.run(agent, told, max_turns=3)
            told = result.to_input_list()
        except (MaxTurnsExceeded, ModelBehaviorError) as error:
            told += [item.to_input_item() for item in error.run_data.new_items] if error.run_data else []
        told.append({"role": "user", "content": "And now?"})
        turns += 1
    return turns


async def with_pydantic(model: Any) -> int:
    """Each answer goes back whole, with a result for each call in it."""
    tool = ToolDefinition(
        name="get_weather",
        description="Say the weather of a city.",
        parameters_json_schema={"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    )
    wanted = ModelRequestParameters(function_tools=[tool], allow_text_output=True)
    told: list[ModelMessage] = [ModelRequest.user_text_prompt("How is the weather in Paris?")]
    cut_off = []
    for max_tokens, choice in ((CUT_OFF, "required"), (120, "required"), (60, "none")):
        settings = ModelSettings(max_tokens=max_tokens, temperature=0.0, tool_choice=choice)
        answer = await model_request(model, told, model_settings=settings, model_request_parameters=wanted)
        told.append(answer)
        results: list[Any] = []
        for part in answer.parts:
            if isinstance(part, ToolCallPart):
                cut_off.append(not is_object(part.args))
                results.append(ToolReturnPart(part.tool_name, "sunny", part.tool_call_id))
        told.append(ModelRequest(parts=[*results, UserPromptPart("And now?")]))
    return len(cut_off)


def is_object(arguments: Any) -> bool:
    try:
        return isinstance(json.loads(arguments) if isinstance(arguments, str) else arguments, dict)
    except ValueError:
        return False


async def main() -> None:
    chat, responses = agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel
    openai = OpenAIProvider(base_url=f"{BASE}/v1", api_key="none")
    found = {
        "openai-agents chat": await with_agents(chat),
        "openai-agents responses": await with_agents(responses),
        "pydantic-ai chat": await with_pydantic(OpenAIChatModel(MODEL, provider=openai)),
        "pydantic-ai responses": await with_pydantic(OpenAIResponsesModel(MODEL, provider=openai)),
        "pydantic-ai anthropic": await with_pydantic(
            AnthropicModel(MODEL, provider=AnthropicProvider(base_url=BASE, api_key="none"))
        ),
    }
    print(json.dumps(found))


asyncio.run(main())
