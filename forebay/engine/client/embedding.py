"""From texts to prompts that are pooled, and from their results to embeddings and scores: on the host, for `LLM` and
the server alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from forebay.base.errors import InvalidRequest
from forebay.families.embedding import Embedding, embedding_of
from forebay.requests.sampling_params import Pooling, PoolingKind, SamplingParams, check_token_ids
from forebay.text.resumption import Message
from forebay.text.tokenizer import Tokenizer

Vector = npt.NDArray[np.float32]

# The words that Qwen3's rerankers were trained with.
JUDGE: Final = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
INSTRUCTION: Final = "Given a web search query, retrieve relevant passages that answer the query"
_ANSWERS: Final = ("yes", "no")


@dataclass(frozen=True, kw_only=True, slots=True)
class Texts:
    """How texts become vectors and scores with one model: `embedding` is read from its files, and `pooling` is in
    effect."""

    embedding: Embedding
    pooling: PoolingKind

    @classmethod
    def of(cls, model_path: str, pooling: str) -> Texts:
        """Read the texts of the checkpoint at `model_path`. Raises ModelError for files that are not what their names
        say."""
        return cls(embedding=embedding_of(Path(model_path)), pooling=PoolingKind(pooling))

    @property
    def judges(self) -> bool:
        """Whether a document is scored by what the model answers, and not by how near two vectors are."""
        return bool(self.embedding.judges_by) or not self.embedding.is_embedder

    @property
    def evidence(self) -> dict[str, Any]:
        """Return the choices with their reasons, for /server_info."""
        named = self.embedding.judges_by
        how = "the files name its tokens" if named else "the files say nothing of vectors"
        return {
            "pooling": self.pooling,
            "normalize": self.embedding.normalize,
            "scores": "yes_no" if self.judges else "cosine",
            "evidence": {
                "pooling": self.embedding.why if self.pooling == self.embedding.pooling else "--pooling",
                "scores": how if self.judges else "the files say how vectors are made",
                "refused": self.embedding.refused or None,
            },
        }

    def vectors(self) -> SamplingParams:
        """Return the parameters of a text that becomes a vector. Raises InvalidRequest if the checkpoint needs steps
        that are not implemented."""
        if self.embedding.refused:
            raise InvalidRequest(f"this model's vectors cannot be had: {self.embedding.refused}", param="model")
        return SamplingParams.of_pooling(Pooling(self.pooling))

    def vector(self, data: bytes, dimensions: int | None = None) -> Vector:
        """Return the first `dimensions` numbers of a result, normalized if the model's vectors are."""
        values = np.frombuffer(data, dtype="<f4").astype(np.float64)[:dimensions]
        if self.embedding.normalize:
            values = values / (np.linalg.norm(values) or 1.0)
        return values.astype(np.float32)

    def verdicts(self, tokenizer: Tokenizer, vocab_size: int) -> SamplingParams:
        """Return the parameters of a question with the answer yes or no. Raises InvalidRequest if these are no
        tokens."""
        tokens = self.embedding.judges_by
        if not tokens:
            spelled = [tokenizer.encode(word, add_special_tokens=False) for word in _ANSWERS]
            if any(len(ids) != 1 for ids in spelled):
                raise InvalidRequest(
                    f"scores compare the answers {' and '.join(_ANSWERS)}, and one of them is no token of this model",
                    param="model",
                )
            tokens = tuple(ids[0] for ids in spelled)
        check_token_ids("true_token_id", tokens, vocab_size)
        return SamplingParams.of_pooling(Pooling(PoolingKind.LAST, tokens))


def check_dimensions(dimensions: int | None, most: int) -> None:
    """Raise InvalidRequest for more numbers than a vector has."""
    if dimensions is not None and not 0 < dimensions <= most:
        raise InvalidRequest(
            f"dimensions is {dimensions}; this model's vectors have {most}: take as many or fewer", param="dimensions"
        )


def question(query: str, document: str, instruction: str = INSTRUCTION) -> list[Message]:
    """The conversation behind which yes means that the document fits, where the model answers without thinking."""
    text = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    return [{"role": "system", "content": JUDGE}, {"role": "user", "content": text}]


def verdict(data: bytes) -> float:
    """Return the probability of yes among yes and no, by the log-probabilities of both."""
    yes, no = np.frombuffer(data, dtype="<f4").tolist()
    return 1.0 / (1.0 + math.exp(min(no - yes, 700.0)))


def nearness(first: Vector, second: Vector) -> float:
    """Return the cosine of the angle between two vectors; 0 if one has no length."""
    a, b = first.astype(np.float64), second.astype(np.float64)
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b) or 1.0))


def paired(first: str | Sequence[str], second: str | Sequence[str]) -> list[tuple[str, str]]:
    """One with each, or one with one. Raises InvalidRequest for lists that do not go together."""
    ones, others = ([text] if isinstance(text, str) else list(text) for text in (first, second))
    if len(ones) == 1:
        ones *= len(others)
    if len(ones) != len(others):
        raise InvalidRequest(f"there are {len(ones)} texts and {len(others)} others: send one, or one for each")
    return list(zip(ones, others, strict=True))
