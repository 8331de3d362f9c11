"""The engine in this process, for scripts: a list of prompts in, a list of outputs out.

llm = LLM(model="...", context_length=4096)
for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
    print(output.text)
"""

from __future__ import annotations

import itertools
import math
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeAlias

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from forebay.base.errors import Conflict, ForebayError, GenerationError, InvalidRequest, from_code
from forebay.base.log import event, get_logger
from forebay.config.disaggregation import refuse_without_server
from forebay.config.resolve import resolve
from forebay.config.sources import refuse_server_settings
from forebay.engine.bring import bring
from forebay.engine.build import build_engine, give_back_freed_memory
from forebay.engine.core import EngineCore
from forebay.engine.embedding import (
    INSTRUCTION,
    Texts,
    Vector,
    check_dimensions,
    nearness,
    paired,
    question,
    verdict,
)
from forebay.engine.frames import TAGS, AddRequest
from forebay.engine.loop import STUCK_WAIT_S
from forebay.engine.stream import merge
from forebay.engine.weights import GivenTensor
from forebay.formats.store import absent_model
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.step_plan import TokenLogprob
from forebay.requests.updates import CacheReport, FinishReason, Update
from forebay.text.resumption import ChatPrompt, Message
from forebay.text.tokenizer import Tokenizer

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]

log = get_logger("llm")


@dataclass(kw_only=True, slots=True)
class RequestOutput:
    """What came of one prompt. `error` is set where `finish_reason` is `ERROR`; what was generated before it is kept.

    `logprobs` has an entry per token and `prompt_logprobs` one per prompt token (None for the first), where asked for.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: ForebayError | None = None
    cache: CacheReport = field(default_factory=CacheReport)
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None

    def take(self, update: Update) -> None:
        """All that the request was told, merged."""
        self.token_ids, self.finish_reason = update.token_ids, update.finish
        self.cache = update.cache or self.cache
        self.logprobs, self.prompt_logprobs = update.logprobs, update.prompt_logprobs
        if update.failure is not None:
            self.error = from_code(update.failure.kind, update.failure.message, update.failure.code)


@dataclass(kw_only=True, slots=True)
class EmbeddingOutput:
    """What became of one text."""

    prompt: str | None
    prompt_token_ids: list[int]
    embedding: Vector
    cache: CacheReport


class LLM:
    """One model, run in the calling thread while a call lasts. Not for several threads at once.

    `flags` are those of the command line with underscores. Raises ConfigError and ModelError as the command does.
    Time-outs and the caps of the queue do not apply: nobody else is waiting. Its memory goes with `close`, at the end
    of a `with`, or with the last reference.
    """

    _engine: EngineCore | None = None

    def __init__(self, model: str | None = None, **flags: Any) -> None:
        refuse_server_settings(flags)
        asked = {"model": model, **flags}
        named = model or flags.get("model_path")
        if named is not None and (of_hub := absent_model(str(named), flags.get("revision"))) is not None:
            bring(
                of_hub, lambda survey: resolve(asked, survey=survey), lambda text: log.info(event("model", what=text))
            )
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
        self.texts = Texts.of(patient.model_path, config.server.pooling)
        sampling = config.server.sampling
        self.default_sampling_params = SamplingParams.defaults(sampling.values, sampling.source)
        self.model = patient.served_model_name
        self._engine, self.info = build_engine(patient)
        self._ids = itertools.count(1)

    def __repr__(self) -> str:
        if self._engine is None:
            return "LLM(closed)"
        return f"LLM({self.model!r}, context_length={self.info.context_length})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.close()

    def close(self) -> None:
        """Give back all memory. Idempotent; nothing can be generated afterwards."""
        self._engine = None
        give_back_freed_memory()

    @property
    def _core(self) -> EngineCore:
        if self._engine is None:
            raise Conflict("this LLM is closed: make another", code="closed")
        return self._engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Generate for each prompt: text, token ids, or `{"prompt": ..}` or `{"prompt_token_ids": ..}` with these;
        outputs in their order.

        `sampling_params` is for all prompts or one for each; without it, the model's own (`default_sampling_params`).
        `use_tqdm` (the field's name for it) shows a progress bar on standard error.

        Raises GenerationError when all have ended and some of them failed: by themselves, the outputs of the others
        are in the error.
        """
        outputs = [self._output(prompt) for prompt in _as_prompts(prompts)]
        self._generate(outputs, sampling_params, use_tqdm)
        return outputs

    def embed(
        self, prompts: Prompt | Sequence[Prompt], *, dimensions: int | None = None, use_tqdm: bool = False
    ) -> list[EmbeddingOutput]:
        """The vector of each prompt (text, or token ids), in their order: what `--pooling` makes of the hidden states
        behind the last norm, cut to `dimensions`, and of length 1 where the checkpoint says so. Raises as `generate`.
        """
        check_dimensions(dimensions, self.info.hidden_size)
        outputs = [self._output(prompt) for prompt in _as_prompts(prompts)]
        told = self._generate(outputs, self.texts.vectors(), use_tqdm)
        return [
            EmbeddingOutput(
                prompt=output.prompt,
                prompt_token_ids=output.prompt_token_ids,
                embedding=self.texts.vector(update.vector, dimensions),
                cache=output.cache,
            )
            for output, update in zip(outputs, told, strict=True)
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
        of yes and no; or where the checkpoint says how vectors are made, the cosine of both texts'. Raises as
        `generate`."""
        pairs = paired(queries, documents)
        if not self.texts.judges:
            texts = list(dict.fromkeys(text for pair in pairs for text in pair))
            of = {text: output.embedding for text, output in zip(texts, self.embed(texts), strict=True)}
            return [nearness(of[query], of[document]) for query, document in pairs]
        params = self.texts.verdicts(self.tokenizer, self.info.vocab_size)
        asked = [question(query, document, instruction) for query, document in pairs]
        outputs = [self._output(self.tokenizer.encode_chat(talk, enable_thinking=False)) for talk in asked]
        return [verdict(update.vector) for update in self._generate(outputs, params, use_tqdm)]

    def sleep(self, tags: Sequence[str] = TAGS) -> None:
        """Give the memory of these tags back until `wake_up`: `kv_cache`, and what it had cached with it, `weights`,
        which are read from their files again, and `cuda_graph`. Raises Conflict where that cannot be."""
        self._core.sleeper.sleep(tags)

    def wake_up(self, tags: Sequence[str] = ()) -> None:
        """Take the memory of these tags, () for all that was given back. Raises Conflict or ModelError, and sleeps
        as before, where the files have changed or memory is short."""
        self._core.sleeper.wake(tags)

    def update_weights_from_disk(self, model_path: str) -> None:
        """Take the weights of another checkpoint of this model; nothing that was cached is used with them. Raises what
        is wrong, and has the old ones then."""
        self._core.sleeper.update(model_path, {})

    def update_weights_from_tensor(self, named_tensors: Mapping[str, Tensor]) -> None:
        """The same of some tensors, by the checkpoint's names, in its dtypes. They are copied when they are loaded and
        kept, so that they can be loaded again."""
        self._core.sleeper.update(None, {name: GivenTensor(tensor) for name, tensor in named_tensors.items()})

    @property
    def weight_version(self) -> int:
        """How often the weights have been updated."""
        return self._core.scheduler.weight_version

    def chat(
        self,
        messages: str | Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        **variables: Any,
    ) -> list[RequestOutput]:
        """Continue one conversation, or each of several; a text is what a user says. `variables` go to the chat
        template. Raises as `generate`."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        conversations = [messages] if messages and isinstance(messages[0], dict) else messages
        prompts = [self._chat_prompt(list(talk), variables) for talk in conversations]  # type: ignore[arg-type]
        outputs = [self._output(prompt.token_ids) for prompt in prompts]
        self._generate(outputs, sampling_params, use_tqdm, [prompt.resume_points for prompt in prompts])
        return outputs

    def _chat_prompt(self, messages: list[Message], variables: dict[str, Any]) -> ChatPrompt:
        if self.info.wants_resume_points:
            return self.tokenizer.encode_chat_prompt(messages, **variables)
        return ChatPrompt(self.tokenizer.encode_chat(messages, **variables), [])

    def _generate(
        self,
        outputs: list[RequestOutput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        resume_points: Sequence[list[int]] | None = None,
    ) -> list[Update]:
        """Run the prompts of `outputs`, which take what each was told. Raises GenerationError as `generate` does."""
        params = _as_params(self.default_sampling_params if sampling_params is None else sampling_params, len(outputs))
        resume_points = resume_points or [[]] * len(outputs)
        wanted = [
            AddRequest(
                request_id=request_id, prompt_token_ids=output.prompt_token_ids, params=how, resume_points=points
            )
            for output, how, points, request_id in zip(outputs, params, resume_points, self._ids, strict=False)
        ]
        with _bar(len(outputs), shown=use_tqdm) as bar:
            task = bar.add_task("generating", total=len(outputs))
            told = self._run(wanted, lambda: bar.advance(task))
        for request, output in zip(wanted, outputs, strict=True):
            output.take(told[request.request_id])
            output.text = self.tokenizer.decode(output.token_ids)
        failures = {place: output.error for place, output in enumerate(outputs) if output.error is not None}
        if failures:
            raise GenerationError(failures, outputs) from next(iter(failures.values()))
        return [told[request.request_id] for request in wanted]

    def _output(self, prompt: Prompt) -> RequestOutput:
        if isinstance(prompt, Mapping):
            prompt = _named(prompt)
        if isinstance(prompt, str):
            return RequestOutput(prompt=prompt, prompt_token_ids=self.tokenizer.encode(prompt))
        return RequestOutput(prompt=None, prompt_token_ids=list(prompt))

    def _run(self, wanted: list[AddRequest], on_end: Callable[[], None]) -> dict[int, Update]:
        """All that each request was told, by id. The engine is fed as rows come free, so that its queue, made for
        servers, never overflows."""
        if self._core.sleeper.resting:
            raise Conflict("the engine is asleep: call wake_up", code="asleep")
        told: dict[int, Update] = {}
        waiting, live = deque(wanted), set[int]()
        try:
            while waiting or live:
                updates: list[Update] = []
                while waiting and len(live) < self.info.max_running_requests:
                    request = waiting.popleft()
                    live.add(request.request_id)
                    updates += self._core.add(request)
                updates += self._core.step()
                if self._core.stuck:
                    self._core.scheduler.constraints.wait(STUCK_WAIT_S)
                for update in updates:
                    if (request_id := update.request_id) not in live:
                        continue  # of a call that was interrupted
                    told[request_id] = merge(told[request_id], update) if request_id in told else update
                    if update.finish is not None:
                        live.remove(request_id)
                        on_end()
        finally:
            # Interrupted: whoever still runs would go on in the next call.
            for request_id in live:
                self._core.abort(request_id)
        return told


def _named(prompt: Mapping[str, Any]) -> str | Sequence[int]:
    found = [prompt[name] for name in ("prompt", "prompt_token_ids") if prompt.get(name) is not None]
    if len(found) != 1 or len(prompt) > 2:
        raise InvalidRequest(f"a prompt has the fields {', '.join(prompt)}: give prompt or prompt_token_ids")
    text_or_ids: str | Sequence[int] = found[0]
    return text_or_ids


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _as_params(params: SamplingParams | Sequence[SamplingParams], n: int) -> list[SamplingParams]:
    if isinstance(params, msgspec.Struct):
        return [params] * n
    if len(params) != n:
        raise InvalidRequest(f"there are {n} prompts and {len(params)} sampling_params: give one, or one for each")
    return list(params)


def _bar(total: int, *, shown: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), disable=not shown or total == 0)
