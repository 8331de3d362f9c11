"""The engine in this process, for scripts: a list of prompts in, a list of outputs out.

llm = LLM(model="...", context_length=4096)
for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
    print(output.text)
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, Self

import msgspec
from torch import Tensor

from forebay.base.errors import Conflict, InvalidRequest
from forebay.base.log import event, get_logger
from forebay.config.adapters import check_name
from forebay.config.disaggregation import refuse_without_server
from forebay.config.resolve import resolve, written_values
from forebay.config.sources import refuse_server_settings
from forebay.engine.client.embedding import (
    INSTRUCTION,
    Texts,
    Vector,
    check_dimensions,
    nearness,
    paired,
    question,
    verdict,
)
from forebay.engine.client.in_process import InProcess
from forebay.engine.client.writing import Prompt, RequestOutput, chat_prompt, output_of
from forebay.engine.frames import TAGS, WEIGHTS
from forebay.engine.lifecycle.adapters import AdapterLoader
from forebay.engine.lifecycle.bring import bring, bring_adapter, bring_adapters
from forebay.engine.lifecycle.weights import GivenTensor
from forebay.engine.loop.build import build_engine
from forebay.engine.loop.core import EngineCore
from forebay.formats.hub_names import absent_adapter, find_adapter
from forebay.formats.store import absent_model
from forebay.requests.sampling_params import PoolingKind, SamplingParams
from forebay.requests.updates import CacheReport
from forebay.text.answers.probes import Findings, find_formats
from forebay.text.end_tokens import end_tokens
from forebay.text.resumption import Message
from forebay.text.tokenizer import Tokenizer

log = get_logger("llm")


@dataclass(kw_only=True, slots=True)
class EmbeddingOutput:
    """The vector of one text."""

    prompt: str | None
    prompt_token_ids: list[int]
    embedding: Vector
    cache: CacheReport


class LLM:
    """One model, run in the calling thread while a call lasts. Not for several threads at once.

    `flags` are those of the command line with underscores. Raises ConfigError and ModelError as the command does.
    Time-outs and the limits of the queue do not apply: no other client is waiting. Its memory is freed by `close`, at
    the end of a `with`, or with the last reference.
    """

    def __init__(self, model: str | None = None, **flags: Any) -> None:
        refuse_server_settings(flags)
        asked = {"model": model, **flags}
        named = model or flags.get("model_path")
        if named is not None and (of_hub := absent_model(str(named), flags.get("revision"))) is not None:
            bring(of_hub, lambda survey: resolve(asked, survey=survey), _note)
        if modules := written_values(asked, {}).get("lora_modules"):
            assert isinstance(modules, tuple), modules
            bring_adapters(modules, lambda survey: resolve(asked, survey=survey), _note)
        config = resolve(asked)
        refuse_without_server("LLM", config)
        scheduling = replace(
            config.engine.scheduling,
            queue_timeout_s=math.inf,
            request_timeout_s=math.inf,
            stall_timeout_s=math.inf,
            max_queued_tokens=sys.maxsize,
        )
        patient = replace(config.engine, scheduling=scheduling)
        self.tokenizer = Tokenizer.from_path(patient.model_path, config.server.chat_template)
        self._formats: Findings | None = None  # since the first conversation
        self.texts = Texts.of(patient.model_path, config.server.pooling)
        sampling = config.server.sampling
        self.default_sampling_params = SamplingParams.defaults(sampling.values, sampling.source)
        self.model = patient.served_model_name
        core, self.info = build_engine(patient)
        core.end_tokens.add(end_tokens(self.tokenizer))
        self._engine = InProcess(core, self.info, self.tokenizer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not sys.is_finalizing() and hasattr(self, "_engine"):  # else the constructor raised
            self.close()

    def close(self) -> None:
        """Free all memory. Idempotent; nothing can be generated afterwards."""
        self._engine.close()

    @property
    def _core(self) -> EngineCore:
        return self._engine.core

    def __repr__(self) -> str:
        if self._engine.is_closed:
            return "LLM(closed)"
        return f"LLM({self.model!r}, context_length={self.info.context_length})"

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        raise_on_error: bool = True,
        lora: str = "",
    ) -> list[RequestOutput]:
        """Generate for each prompt of an iterable: text, token ids, or `{"prompt": ..}` or `{"prompt_token_ids": ..}`
        with these; outputs in their order.

        `sampling_params` is for all prompts or one for each; without it, the model's own (`default_sampling_params`).
        `use_tqdm` (the field's name for it) shows on standard error how many are done, and tokens per second. `lora`
        names the loaded adapter to apply to all of them, "" for the model alone.

        Raises GenerationError when all have ended and some of them failed; the outputs of the others are in the error.
        With `raise_on_error=False` each failed output has its `error`, and nothing is raised.
        """
        listed = _as_prompts(prompts)
        params = self._params(sampling_params, listed)
        outputs = (output_of(prompt, self.tokenizer) for prompt in listed)
        return self._engine.write(((output, []) for output in outputs), params, listed, use_tqdm, raise_on_error, lora)

    def chat(
        self,
        messages: str | Sequence[Message] | Iterable[str | Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        raise_on_error: bool = True,
        lora: str = "",
        **variables: Any,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of several; a text is a message of the user. `variables` go to the chat
        template (`tools`, `enable_thinking`); `continue_final_message=True` continues the assistant's last message. All
        else as in `generate`."""
        talks = _as_talks(messages)
        params = self._params(sampling_params, talks)
        places = self.info.wants_resume_points
        found = self._formats = self._formats or find_formats(self.tokenizer)
        prompts = (chat_prompt(talk, self.tokenizer, found, variables, with_places=places) for talk in talks)
        outputs = ((output_of(prompt.token_ids, self.tokenizer), prompt.resume_points) for prompt in prompts)
        return self._engine.write(outputs, params, talks, use_tqdm, raise_on_error, lora)

    def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer: `encode`, `decode`, `encode_chat`."""
        return self.tokenizer

    def embed(
        self,
        prompts: Prompt | Iterable[Prompt],
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        use_tqdm: bool = False,
        lora: str = "",
    ) -> list[EmbeddingOutput]:
        """The vector of each prompt (text, or token ids), in their order: what `--pooling` makes of the hidden states
        behind the last norm, cut to `dimensions`, and of length 1 where the checkpoint says so. Texts stand behind the
        checkpoint's prompt of `prompt_name`. Raises as `generate`.
        """
        check_dimensions(dimensions, self.info.vector_size)
        asked = (
            self.texts.with_prompt(prompt, prompt_name) if isinstance(prompt, str) else prompt
            for prompt in _as_prompts(prompts)
        )
        outputs = [output_of(prompt, self.tokenizer) for prompt in asked]
        results = self._engine.pool(outputs, self.texts.vectors(), use_tqdm, lora)
        return [
            EmbeddingOutput(
                prompt=output.prompt,
                prompt_token_ids=output.prompt_token_ids,
                embedding=self.texts.vector(update.vector, dimensions),
                cache=output.cache,
            )
            for output, update in zip(outputs, results, strict=True)
        ]

    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        instruction: str = INSTRUCTION,
        use_tqdm: bool = False,
    ) -> list[float]:
        """How well each document fits its query (one for all, or one for each): how likely the model's answer yes is,
        of yes and no; of a text encoder with one label its probability; or where the checkpoint says how vectors are
        made, the cosine of both texts'. Raises as `generate`."""
        pairs = paired(queries, documents)
        if self.texts.crosses:
            return self._scores_of_head(pairs, use_tqdm)
        if not self.texts.judges:
            texts = list(dict.fromkeys(text for pair in pairs for text in pair))
            of = {text: output.embedding for text, output in zip(texts, self.embed(texts), strict=True)}
            return [nearness(of[query], of[document]) for query, document in pairs]
        params = self.texts.verdicts(self.tokenizer, self.info.vocab_size)
        asked = [question(query, document, instruction) for query, document in pairs]
        chats = (self.tokenizer.encode_chat(talk, enable_thinking=False) for talk in asked)
        outputs = [output_of(chat, self.tokenizer) for chat in chats]
        return [verdict(update.vector) for update in self._engine.pool(outputs, params, use_tqdm)]

    def _scores_of_head(self, pairs: Sequence[tuple[str, str]], use_tqdm: bool) -> list[float]:
        outputs = [output_of(self.texts.pair(self.tokenizer, *pair), self.tokenizer) for pair in pairs]
        results = self._engine.pool(outputs, self.texts.labels(), use_tqdm)
        return [float(self.texts.probabilities(update.vector)[0]) for update in results]

    def classify(self, prompts: Prompt | Iterable[Prompt], *, use_tqdm: bool = False) -> list[dict[str, float]]:
        """Return the probability of each label, by its name, of each text. Raises InvalidRequest for a model without a
        head for texts, else as `generate`."""
        params = self.texts.labels()
        if params.pooling is not None and params.pooling.kind is PoolingKind.ALL:
            raise InvalidRequest("this model labels tokens, not texts", code="no_labels")
        outputs = [output_of(prompt, self.tokenizer) for prompt in _as_prompts(prompts)]
        shares = (self.texts.probabilities(update.vector) for update in self._engine.pool(outputs, params, use_tqdm))
        names = () if self.texts.encoder is None else self.texts.encoder.labels
        return [dict(zip(names, values.tolist(), strict=True)) for values in shares]

    def load_adapter(self, name: str, path: str) -> None:
        """Load the adapter (LoRA) in the folder `path`, or of that name on the hub, for calls that name it. Raises
        ModelError for an adapter that does not fit, and Conflict for a name that is in use or if no slot is free
        (`max_loras`)."""
        adapters = self._adapters
        check_name(name, self.model)
        if (of_hub := absent_adapter(path)) is not None:
            bring_adapter(of_hub, lambda files: None, _note)
        adapters.load_now(name, str(find_adapter(path)))

    def unload_adapter(self, name: str) -> None:
        """Free the slot of an adapter. Raises NotFound for a name that is not loaded."""
        self._adapters.unload_now(name)

    @property
    def _adapters(self) -> AdapterLoader:
        if (adapters := self._core.adapters) is None:
            raise Conflict("there are no slots for adapters: make the LLM with enable_lora=True", code="no_adapters")
        return adapters

    def sleep(self, tags: Sequence[str] = TAGS) -> None:
        """Release the memory of these tags until `wake_up`: `kv_cache` with all cached prefixes, `weights`, which are
        read from their files again, and `cuda_graph`. Raises Conflict if a tag cannot be released."""
        if WEIGHTS in tags:
            self.tokenizer.release_memory()
        self._core.sleeper.sleep(tags)

    def wake_up(self, tags: Sequence[str] = ()) -> None:
        """Map the memory of these tags again, () for all released ones. Raises Conflict or ModelError, and sleeps as
        before, if the files have changed or memory is short."""
        self._core.sleeper.wake(tags)

    def update_weights_from_disk(self, model_path: str) -> None:
        """Load the weights of another checkpoint of this model; cached prefixes of the old weights are not used with
        them. If it raises, the old weights stay."""
        self._core.sleeper.update(model_path, {})

    def update_weights_from_tensor(self, named_tensors: Mapping[str, Tensor]) -> None:
        """Replace some tensors, given by the checkpoint's names and in its dtypes. They are copied when they are loaded
        and kept, so that they can be loaded again."""
        self._core.sleeper.update(None, {name: GivenTensor(tensor) for name, tensor in named_tensors.items()})

    @property
    def weight_version(self) -> int:
        """How often the weights have been updated."""
        return self._core.scheduler.queues.weight_version

    def _params(
        self, given: SamplingParams | Sequence[SamplingParams] | None, prompts: Iterable[object]
    ) -> Iterator[SamplingParams]:
        """For one prompt after the other."""
        if given is None or isinstance(given, msgspec.Struct):
            return repeat(self.default_sampling_params if given is None else given)
        if not isinstance(prompts, Sequence) or len(prompts) != len(given):
            there = f"there are {len(prompts)}" if isinstance(prompts, Sequence) else "nobody knows how many there are"
            raise InvalidRequest(f"{there} prompts and {len(given)} sampling_params: give one, or one for each")
        return iter(given)


def _note(text: str) -> None:
    log.info(event("model", what=text))


def _as_prompts(prompts: Prompt | Iterable[Prompt]) -> Iterable[Prompt]:
    ids = isinstance(prompts, Sequence) and len(prompts) > 0 and isinstance(prompts[0], int)
    return [prompts] if ids or isinstance(prompts, str | Mapping) else prompts  # type: ignore[list-item,return-value]


def _as_talks(messages: Any) -> Iterable[str | Sequence[Message]]:
    one = isinstance(messages, Sequence) and len(messages) > 0 and isinstance(messages[0], Mapping)
    return [messages] if one or isinstance(messages, str) else messages
