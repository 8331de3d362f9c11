"""Rank documents by the similarity of their embeddings to that of a query, without a server.

python examples/embeddings.py "what feeds a turbine?"
python examples/embeddings.py "what feeds a turbine?" --model Qwen/Qwen3-Embedding-0.6B
"""

from __future__ import annotations

import argparse

import numpy as np

from forebay import LLM

DOCUMENTS = [
    "A forebay is the pool from which water flows to a turbine.",
    "The violin has four strings.",
    "Water turns the blades of a turbine, and the turbine drives a generator.",
    "Bread is baked from flour, water and yeast.",
]


def main() -> None:
    parser = argparse.ArgumentParser(description="Rank documents by similarity to a query.")
    parser.add_argument("query")
    parser.add_argument("documents", nargs="*", default=DOCUMENTS)
    parser.add_argument("--model", help="a name on the Hugging Face hub, a folder or a GGUF file")
    options = parser.parse_args()

    with LLM(options.model) as llm:
        outputs = llm.embed([options.query, *options.documents])
    query, *documents = (np.array(output.embedding) for output in outputs)
    # Vectors have length 1 unless the checkpoint says otherwise, so that the product is the cosine.
    ranked = sorted(zip(options.documents, documents, strict=True), key=lambda each: -float(query @ each[1]))
    for document, vector in ranked:
        print(f"{query @ vector:.3f}  {document}")


if __name__ == "__main__":
    main()
