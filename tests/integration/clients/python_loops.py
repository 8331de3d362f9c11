"""Tool loops of Python's agent libraries against a server: BASE LIBRARY, in an environment that has them.

Prints for each dialect, whole and streamed, what the last answer said and how many tools were run.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any

BASE, LIBRARY = sys.argv[1:]
ASKED = "Do the ten steps."
LIMIT = 4000
THINKS: dict[str, Any] = {"type": "enabled", "budget_tokens": 1024}
ran: list[tuple[Any, ...]] = []


def weather(city: str) -> str:
    """Say the weather of a city."""
    ran.append(("weather", city))
    return f"sunny in {city}"


def add(a: float, b: float) -> str:
    """Add two numbers."""
    ran.append(("add", a, b))
    return str(a + b)


def search(query: str, limit: int = 3, tags: list[str] | None = None) -> str:
    """Search notes."""
    ran.append(("search", query, limit, tags))
    return ""


TOOLS: list[Any] = [weather, add, search]


async def with_openai_agents(kind: str, streamed: bool) -> str:
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{BASE}/v1", api_key="none", max_retries=0)
    models = {"chat": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}
    tools = [agents.function_tool(tool) for tool in TOOLS]
    agent = agents.Agent(name="a", instructions="Help.", model=models[kind]("tiny", client), tools=tools)
    if not streamed:
        return str((await agents.Runner.run(agent, ASKED, max_turns=20)).final_output)
    running = agents.Runner.run_streamed(agent, ASKED, max_turns=20)
    async for _ in running.stream_events():
        pass
    return str(running.final_output)


async def with_pydantic_ai(kind: str, streamed: bool) -> str:
    from pydantic_ai import Agent
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    async def read(_: Any, events: Any) -> None:
        async for _event in events:
            pass

    model: Any
    if kind == "messages":
        model = AnthropicModel("tiny", provider=AnthropicProvider(base_url=BASE, api_key="none"))
    else:
        provider = OpenAIProvider(base_url=f"{BASE}/v1", api_key="none")
        model = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}[kind]("tiny", provider=provider)
    settings: Any = {"anthropic_thinking": THINKS, "max_tokens": LIMIT} if kind == "messages" else {}
    agent = Agent(model, tools=TOOLS, model_settings=settings, retries=0)
    return str((await agent.run(ASKED, event_stream_handler=read if streamed else None)).output)


async def with_langgraph(kind: str, streamed: bool) -> str:
    from langchain.agents import create_agent
    from langchain_anthropic import ChatAnthropic
    from langchain_openai import ChatOpenAI

    asked: dict[str, Any] = {"api_key": "none", "model": "tiny", "max_retries": 0}
    model: Any
    if kind == "messages":
        model = ChatAnthropic(base_url=BASE, max_tokens=LIMIT, thinking=THINKS, **asked)
    elif kind == "responses":
        model = ChatOpenAI(
            base_url=f"{BASE}/v1", use_responses_api=True, output_version="responses/v1",
            include=["reasoning.encrypted_content"], store=False, **asked,
        )  # fmt: skip
    else:
        model = ChatOpenAI(base_url=f"{BASE}/v1", **asked)
    graph, options = create_agent(model, TOOLS), {"recursion_limit": 60}
    state: Any = {"messages": [("user", ASKED)]}
    if streamed:
        async for mode, found in graph.astream(state, options, stream_mode=["messages", "values"]):
            state = found if mode == "values" else state
    else:
        state = await graph.ainvoke(state, options)
    return str(state["messages"][-1].text)


LOOPS: dict[str, tuple[Callable[[str, bool], Awaitable[str]], tuple[str, ...]]] = {
    "openai-agents": (with_openai_agents, ("chat", "responses")),
    "pydantic-ai": (with_pydantic_ai, ("chat", "messages", "responses")),
    "langgraph": (with_langgraph, ("chat", "messages", "responses")),
}


async def main() -> None:
    loop, kinds = LOOPS[LIBRARY]
    found = {}
    for kind in kinds:
        for streamed in (False, True):
            ran.clear()
            found[f"{kind} {'streamed' if streamed else 'whole'}"] = [await loop(kind, streamed), len(ran)]
    print(json.dumps(found))


asyncio.run(main())
