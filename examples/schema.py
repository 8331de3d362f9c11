"""Read an object of a pydantic class from an answer: the server samples only tokens that its JSON schema allows.

forebay serve
python examples/schema.py Oslo
"""

from __future__ import annotations

import argparse
from typing import Annotated, Literal

from openai import OpenAI
from pydantic import BaseModel, Field


class City(BaseModel):
    """What to extract. Bounds keep the answer short: without them a small model may write until `max_tokens`."""

    name: Annotated[str, Field(max_length=20)]
    continent: Literal["Africa", "America", "Asia", "Europe", "Oceania"]
    inhabitants: Annotated[int, Field(ge=0, le=50_000_000)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Describe a city as an object.")
    parser.add_argument("city")
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    options = parser.parse_args()

    client = OpenAI(base_url=f"{options.url}/v1", api_key="none")
    completion = client.chat.completions.parse(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": f"Describe the city {options.city} as JSON."}],
        response_format=City,
        temperature=0,
    )
    city = completion.choices[0].message.parsed
    print(f"{city.name} ({city.continent}): {city.inhabitants:,} inhabitants")


if __name__ == "__main__":
    main()
