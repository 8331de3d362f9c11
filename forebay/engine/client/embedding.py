"""From texts to prompts that are pooled, and from their results to embeddings and scores: on the host, for `LLM` and
the server alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from forebay.base.errors import InvalidRequest, brief
from forebay.families.base.embedding import LEXICAL, MODULES, MULTI, Embedding, embedding_of
from forebay.families.config.model_config import ModelConfig, config_at
from forebay.families.parts.text_encoder import Head, TextEncoderConfig
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
TOKEN_EMBED: Final = "token_embed"
TOKEN_CLASSIFY: Final = "token_classify"
_UNWEIGHED: Final = ("bos_token", "cls_token", "eos_token", "sep_token", "pad_token", "unk_token")


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoder:
    """A text encoder: its type, the kinds of its tokens, and the labels of its head, of each token or of a text whose
    tokens `head_pooling` reduces. `independent`: each label has a probability of its own. `lexical` and `multi` are
    the outputs of the layers behind each token that give its weight and its vector, None without such a layer."""

    model_type: str
    vocab_size: int
    num_types: int = 0
    labels: tuple[str, ...] = ()
    of_tokens: bool = False
    head_pooling: PoolingKind = PoolingKind.CLS
    independent: bool = False
    lexical: tuple[int, int] | None = None
    multi: tuple[int, int] | None = None

    @classmethod
    def of(cls, config: ModelConfig) -> Encoder | None:
        """Return the encoder of a configuration; None for a decoder."""
        if not isinstance(config, TextEncoderConfig):
            return None
        ends = [0, *accumulate(layer.outputs for layer in config.token_layers)]
        parts = dict(zip((layer.folder for layer in config.token_layers), pairwise(ends), strict=True))
        return cls(
            model_type=config.model_type,
            vocab_size=config.vocab_size,
            num_types=config.num_types,
            labels=config.labels,
            of_tokens=config.head is Head.TOKENS,
            head_pooling=PoolingKind.MEAN if config.head_mean else PoolingKind.CLS,
            independent=config.independent_labels,
            lexical=parts.get(LEXICAL),
            multi=parts.get(MULTI),
        )

    @property
    def crosses(self) -> bool:
        """Whether it scores a pair of texts by its one label."""
        return len(self.labels) == 1 and not self.of_tokens

    @property
    def does(self) -> str:
        """Return what it can be asked for, in words."""
        if self.crosses:
            return "scores of pairs (/v1/rerank, /v1/score)"
        if self.labels:
            return f"{len(self.labels)} labels {'of tokens' if self.of_tokens else 'of texts'} (/classify)"
        also = ", weights of words (/embed_sparse)" if self.lexical else ""
        return f"vectors (/v1/embeddings){also} and scores by their nearness (/v1/rerank)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Texts:
    """How texts become vectors and scores with one model: `embedding` is read from its files, and `pooling` is in
    effect. `encoder` None: a decoder."""

    embedding: Embedding
    pooling: PoolingKind
    encoder: Encoder | None = None

    @classmethod
    def of(cls, model_path: str, pooling: str) -> Texts:
        """Read the texts of the checkpoint at `model_path`. Raises ModelError for files that are not what their names
        say."""
        path = Path(model_path)
        config = config_at(path)
        found = None if config is None else Encoder.of(config)
        embedding = embedding_of(path)
        if found is None and embedding.dense:
            why = f"{MODULES} wants a Dense, which is served of text encoders alone"
            embedding = replace(embedding, refused=embedding.refused or why)
        return cls(embedding=embedding, pooling=PoolingKind(pooling), encoder=found)

    @property
    def judges(self) -> bool:
        """Whether a document is scored by what the model answers, and not by how near two vectors are."""
        return self.encoder is None and (bool(self.embedding.judges_by) or not self.embedding.is_embedder)

    @property
    def crosses(self) -> bool:
        """Whether a text encoder scores a pair of texts by its head."""
        return self.encoder is not None and self.encoder.crosses

    @property
    def does(self) -> str:
        """Return what the model can be asked for, in words."""
        return "vectors, scores and answers" if self.encoder is None else self.encoder.does

    def not_a_decoder(self, encoder: Encoder) -> InvalidRequest:
        """Return the error for a request that a text encoder cannot answer, with what it can do."""
        what = f"a {encoder.model_type} is a text encoder, which generates nothing: ask it for {self.does}"
        return InvalidRequest(what, code="not_a_decoder", param="model")

    def with_prompt(self, text: str, name: str | None) -> str:
        """Return the text behind the prompt of a task, None for the checkpoint's own default. Raises InvalidRequest for
        a name that the checkpoint does not have."""
        prompts = dict(self.embedding.prompts)
        if name is not None and name not in prompts:
            known = ", ".join(prompts) or "none"
            raise InvalidRequest(
                f"prompt_name is {brief(name)}; this model has {known}: leave it out, or put the prompt into the text",
                code="unknown_prompt",
                param="prompt_name",
            )
        return prompts.get(name or self.embedding.default_prompt, "") + text

    @property
    def evidence(self) -> dict[str, Any]:
        """Return the choices with their reasons, for /server_info."""
        named = self.embedding.judges_by
        how = "the files name its tokens" if named else "the files say nothing of vectors"
        return {
            "pooling": self.pooling,
            "normalize": self.embedding.normalize,
            "scores": "head" if self.crosses else "yes_no" if self.judges else "cosine",
            "prompts": [name for name, _ in self.embedding.prompts],
            "labels": [] if self.encoder is None else list(self.encoder.labels),
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
        return SamplingParams.of_pooling(Pooling(self.pooling, head=bool(self.embedding.dense)))

    def vector(self, data: bytes, dimensions: int | None = None) -> Vector:
        """Return the first `dimensions` numbers of a result, normalized if the model's vectors are."""
        values = np.frombuffer(data, dtype="<f4").astype(np.float64)[:dimensions]
        if self.embedding.normalize:
            values = values / (np.linalg.norm(values) or 1.0)
        return values.astype(np.float32)

    def of_each_token(self, task: str) -> SamplingParams:
        """Return the parameters of a text whose tokens have a weight each (`token_classify`) or a vector
        (`token_embed`). Raises InvalidRequest for a model without that."""
        encoder = self.encoder
        outputs = None if encoder is None else encoder.lexical if task == TOKEN_CLASSIFY else encoder.multi
        if outputs is None and task == TOKEN_CLASSIFY:
            raise InvalidRequest(
                f"this model has no weights of tokens ({LEXICAL}.pt): ask it for {self.does}",
                code="no_token_weights",
                param="model",
            )
        return SamplingParams.of_pooling(Pooling(PoolingKind.ALL, head=outputs is not None, outputs=outputs))

    def word_weights(self, data: bytes) -> npt.NDArray[np.float64]:
        """Return the weight of each token, which is 0 or more, [tokens]."""
        weights: npt.NDArray[np.float64] = np.frombuffer(data, dtype="<f4").astype(np.float64)
        return weights.clip(min=0.0)

    def token_vectors(self, data: bytes, width: int) -> npt.NDArray[np.float32]:
        """Return the vector of each token, of `width` numbers; of a model with layers for that of length 1, and without
        the first token's (BGE-M3)."""
        if self.encoder is None or self.encoder.multi is None:
            return np.frombuffer(data, dtype="<f4").reshape(-1, width)
        first, end = self.encoder.multi
        values = np.frombuffer(data, dtype="<f4").astype(np.float64).reshape(-1, end - first)[1:]
        lengths = np.linalg.norm(values, axis=1, keepdims=True)
        return (values / np.where(lengths == 0, 1.0, lengths)).astype(np.float32)

    def labels(self) -> SamplingParams:
        """Return the parameters of a text that is classified. Raises InvalidRequest for a model without a head."""
        encoder = self.encoder
        if encoder is None or not encoder.labels:
            raise InvalidRequest(
                f"this model has no classification head: ask it for {self.does}", code="no_labels", param="model"
            )
        kind = PoolingKind.ALL if encoder.of_tokens else encoder.head_pooling
        return SamplingParams.of_pooling(Pooling(kind, head=True))

    def probabilities(self, data: bytes) -> npt.NDArray[np.float64]:
        """Return the probability of each label, of a text [labels] or of each of its tokens [tokens, labels]."""
        assert self.encoder is not None, "labels without a head"
        logits = np.frombuffer(data, dtype="<f4").astype(np.float64).reshape(-1, len(self.encoder.labels))
        shares: npt.NDArray[np.float64] = 1.0 / (1.0 + np.exp(-logits.clip(-700.0, 700.0)))
        if not self.encoder.independent and len(self.encoder.labels) > 1:
            powers = np.exp(logits - logits.max(axis=1, keepdims=True))
            shares = powers / powers.sum(axis=1, keepdims=True)
        return shares if self.encoder.of_tokens else shares.reshape(-1)

    def pair(self, tokenizer: Tokenizer, first: str, second: str, max_tokens: int | None = None) -> list[int]:
        """Return the ids of a pair of texts for a text encoder, each of them with its kind."""
        assert self.encoder is not None, "pairs are for a text encoder"
        ids, kinds = tokenizer.encode_pair(first, second, max_tokens=max_tokens)
        last = max(0, self.encoder.num_types - 1)
        return [token + self.encoder.vocab_size * min(kind, last) for token, kind in zip(ids, kinds, strict=True)]

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


def unweighed_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids that have no weight as words: those around a text, of padding, and of what is unknown."""
    spelled = [tokenizer.special_names[name] for name in _UNWEIGHED if name in tokenizer.special_names]
    found = [tokenizer.encode(word, add_special_tokens=False, parse_special=True) for word in spelled]
    return frozenset({*tokenizer.encode(""), *(ids[0] for ids in found if len(ids) == 1)})


def check_dimensions(dimensions: int | None, most: int) -> None:
    """Raise InvalidRequest for more numbers than a vector has."""
    if dimensions is not None and not 0 < dimensions <= most:
        raise InvalidRequest(
            f"dimensions is {dimensions}; this model's vectors have {most}: take as many or fewer", param="dimensions"
        )


def as_type(vector: Vector, dtype: str) -> npt.NDArray[Any]:
    """Return a vector as `float`, `int8` (127 for 1, of vectors of length 1 as they are), or one bit for each number:
    `ubinary` has eight in a byte, the first in the highest bit, and `binary` 128 less."""
    if dtype == "int8":
        return np.rint(vector.astype(np.float64) * 127.0).clip(-127, 127).astype(np.int8)
    if dtype == "ubinary":
        return np.packbits(vector > 0)
    if dtype == "binary":
        return (np.packbits(vector > 0).astype(np.int16) - 128).astype(np.int8)
    return vector


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
    return float(np.clip(a @ b / (np.linalg.norm(a) * np.linalg.norm(b) or 1.0), -1.0, 1.0))


def paired(first: str | Sequence[str], second: str | Sequence[str]) -> list[tuple[str, str]]:
    """One with each, or one with one. Raises InvalidRequest for lists that do not go together."""
    ones, others = ([text] if isinstance(text, str) else list(text) for text in (first, second))
    if len(ones) == 1:
        ones *= len(others)
    if len(ones) != len(others):
        raise InvalidRequest(f"there are {len(ones)} texts and {len(others)} others: send one, or one for each")
    return list(zip(ones, others, strict=True))
