"""Hold a conversation with a server, and print each answer as it is generated.

forebay serve
python examples/chat.py "Why is the sky blue?" "And at sunset?"
"""

from __future__ import annotations

import argparse

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description="Stream the answers of a conversation.")
    parser.add_argument("questions", nargs="+", help="what the user says, one turn after the other")
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens of an answer, at most")
    options = parser.parse_args()

    client = OpenAI(base_url=f"{options.url}/v1", api_key="none")
    model = client.models.list().data[0].id
    messages = [{"role": "system", "content": "Answer in one sentence."}]
    for question in options.questions:
        print(f"> {question}")
        messages.append({"role": "user", "content": question})
        stream = client.chat.completions.create(
            model=model,
            messages=messages,
            max_tokens=options.max_tokens,
            stream=True,
            stream_options={"include_usage": True},  # the last event then has `usage` and no choice
        )
        answer = ""
        for chunk in stream:
            for choice in chunk.choices:
                text = choice.delta.content or ""
                print(text, end="", flush=True)
                answer += text
        messages.append({"role": "assistant", "content": answer})
        usage = chunk.usage
        print(f"\n[{usage.prompt_tokens_details.cached_tokens} of {usage.prompt_tokens} prompt tokens were cached]")


if __name__ == "__main__":
    main()
