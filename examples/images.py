"""Ask about an image file.

forebay serve HuggingFaceTB/SmolVLM-256M-Instruct
python examples/images.py photo.jpg
"""

from __future__ import annotations

import argparse
import base64
import mimetypes
from pathlib import Path

from openai import OpenAI


def data_url(path: Path) -> str:
    """Return the file's bytes as a URL, so that the server need not download anything."""
    kind = mimetypes.guess_type(path)[0] or "image/jpeg"
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask about an image.")
    parser.add_argument("image", type=Path)
    parser.add_argument("question", nargs="?", default="What is in this picture?")
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens of the answer, at most")
    options = parser.parse_args()

    client = OpenAI(base_url=f"{options.url}/v1", api_key="none")
    answer = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": data_url(options.image)}},
                    {"type": "text", "text": options.question},
                ],
            }
        ],
        max_tokens=options.max_tokens,
    )
    print(answer.choices[0].message.content)
    details = answer.usage.prompt_tokens_details.model_dump()
    print(f"[{details['image_tokens']} of {answer.usage.prompt_tokens} prompt tokens are the image]")


if __name__ == "__main__":
    main()
