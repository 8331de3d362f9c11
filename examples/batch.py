"""Complete many prompts in one call, without a server.

python examples/batch.py
python examples/batch.py --model Qwen/Qwen3-0.6B "Once upon a time"
"""

from __future__ import annotations

import argparse

from forebay import LLM, SamplingParams

COUNTRIES = ["France", "Peru", "Kenya", "Japan", "Norway", "Egypt", "Canada", "India"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Complete prompts in one batch.")
    parser.add_argument("prompts", nargs="*", default=[f"The capital of {country} is" for country in COUNTRIES])
    parser.add_argument("--model", help="a name on the Hugging Face hub, a folder or a GGUF file")
    parser.add_argument("--max-tokens", type=int, default=12, help="tokens of an output, at most")
    options = parser.parse_args()

    # The engine batches all prompts of a call, so pass a list instead of calling in a loop. A prompt's beginning that
    # another one has already computed comes from the prefix cache.
    with LLM(options.model) as llm:
        outputs = llm.generate(options.prompts, SamplingParams(temperature=0, max_tokens=options.max_tokens))
    for output in outputs:
        print(f"{output.prompt} ->{output.text!r} ({output.finish_reason})")


if __name__ == "__main__":
    main()
