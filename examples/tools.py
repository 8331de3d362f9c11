"""Let the model call a Python function, send it the result, and print the answer.

forebay serve
python examples/tools.py
"""

from __future__ import annotations

import argparse
import json

from openai import OpenAI

CELSIUS = {"Oslo": 4, "Lima": 19, "Cairo": 28}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_temperature",
        "description": "Return the temperature of a city in degrees Celsius.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": list(CELSIUS)}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def get_temperature(city: str) -> str:
    return f"{CELSIUS[city]} degrees"


def main() -> None:
    parser = argparse.ArgumentParser(description="Answer a question with the result of a tool.")
    parser.add_argument("question", nargs="?", default="How warm is it in Oslo?")
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens of the last answer, at most")
    options = parser.parse_args()

    client = OpenAI(base_url=f"{options.url}/v1", api_key="none")
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": options.question}]
    # "required" forces a call, whose arguments then always match the schema. "auto" lets the model decide.
    request = client.chat.completions.create(
        model=model, messages=messages, tools=[TOOL], tool_choice="required", parallel_tool_calls=False
    )
    message = request.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    for call in message.tool_calls:
        arguments = json.loads(call.function.arguments)
        result = get_temperature(**arguments)
        print(f"{call.function.name}({arguments['city']!r}) -> {result}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    answer = client.chat.completions.create(model=model, messages=messages, max_tokens=options.max_tokens)
    print(answer.choices[0].message.content)


if __name__ == "__main__":
    main()
