"""Text to token ids and back, for prompts, chats and outputs."""

from __future__ import annotations

import hashlib
import re
import time
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from forebay.base.errors import InvalidRequest, RequestTooLarge
from forebay.text import tokenizer_files
from forebay.text.backend import Backend
from forebay.text.chat_template import ChatTemplate
from forebay.text.detokenizer import decode
from forebay.text.gguf_tokenizer import from_gguf
from forebay.text.resumption import IMAGE_CHARS, Breakpoint, ChatPrompt, Content, Message, places, token_counts
from forebay.text.token_bytes import TokenBytes
from forebay.text.tokenizer_parts import TokenizerParts

MAX_BYTES_PER_TOKEN: Final = 8  # a longer prompt than this times the context cannot fit; it is refused before the work
MAX_PLACES_S: Final = 1.0  # for all renderings beside the one that is asked for; hints are not worth more
MAX_WORK_CHARS: Final = 1 << 20
_FITTING: Final = {"tool_use": "tools", "rag": "documents"}  # named templates, by the variable that wants them
_MARKS: Final = range(0xF0000, 0xFFFFE)  # a private-use plane to choose a mark from


class _Encoded(NamedTuple):
    """Token ids, and the position in characters at which each token's text ends; no positions if they were not
    requested."""

    ids: list[int]
    ends: list[int]


class ImageText(NamedTuple):
    """How an image is written in a conversation: templates write the control `token`, which is replaced by `framed`.
    For a template that writes no images `written`, which has the token, is put between the texts of its message."""

    token: str
    written: str
    framed: str


def _any_of(words: Sequence[str]) -> re.Pattern[str]:
    """Return a pattern that matches the first of the words; nothing if there are none."""
    return re.compile("|".join(map(re.escape, words)) or r"(?!)")


class _Templates:
    """The chat templates of a checkpoint: `main`, None without one, and those for conversations with tools or
    documents. `own` is the operator's template, which replaces them all."""

    def __init__(self, parts: TokenizerParts, own: str | None) -> None:
        source, named = own or parts.template, {} if own else parts.named_templates
        self.main = ChatTemplate(source, parts.names) if source else None
        self._named = {name: ChatTemplate(named[name], parts.names) for name in _FITTING if name in named}
        self.all = [*([] if self.main is None else [self.main]), *self._named.values()]
        sources = "\0".join(text for pair in [("", source or ""), *sorted(named.items())] for text in pair)
        self.digest = (
            hashlib.blake2b(sources.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
            if source or named
            else ""
        )

    def fitting(self, variables: Mapping[str, Any]) -> ChatTemplate | None:
        """Return the template for a conversation with these variables, as transformers chooses it."""
        fitting = (self._named.get(name) for name, wanted in _FITTING.items() if variables.get(wanted))
        return next((template for template in fitting if template is not None), self.main)


class Tokenizer:
    """Thread-safe, and no call waits for the encoding of another text.

    Text becomes control tokens (`<|im_start|>`) only on request: in a chat template's own output, or with
    `parse_special=True`. The same spelling in a user's text is text.
    """

    def __init__(self, parts: TokenizerParts, chat_template: str | None = None) -> None:
        """`chat_template` is the operator's own, instead of the checkpoint's."""
        self._backend = Backend(parts.backend)
        self._added, self._add_bos, self._add_eos = parts.added, parts.add_bos, parts.add_eos
        self._space_prefix = parts.space_prefix
        self.table = TokenBytes(parts.pieces, parts.reader, set(parts.added.values()), set(parts.hidden))
        self.whole_table = self.table.showing(parts.added)  # with the tokens that are no part of a text
        control = sorted((word for word, token in parts.added.items() if token in parts.control), key=len, reverse=True)
        self._control = _any_of(control)
        added = parts.backend.get_added_tokens_decoder().values()
        self._control_is_normalized = any(token.special and token.normalized for token in added)
        hidden = [word for word in control if parts.added[word] in parts.hidden]
        self._hidden = _any_of(hidden)
        self.response_template, self.added = parts.response_template, parts.added.keys()
        self.special_names = dict(parts.names)  # `bos_token`, `eos_token` and the like, as they are spelled
        self.eos_token_id = parts.added.get(parts.names.get("eos_token", ""))
        self.bos_token_id = parts.added.get(parts.names.get("bos_token", ""))
        self._templates = _Templates(parts, chat_template)
        self.chat_template, self.template_digest = self._templates.main, self._templates.digest
        self.image_text: ImageText | None = None  # of a model that accepts images; set once, before any conversation

    @classmethod
    def from_path(cls, path: str | Path, chat_template: str | None = None) -> Tokenizer:
        """Read a checkpoint's folder or a `.gguf` file. Raises ModelError for an unsupported tokenizer, and for the
        tokenizer of another model."""
        return cls(tokenizer_files.from_path(Path(path)), chat_template)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], chat_template: str | None = None) -> Tokenizer:
        """Build the tokenizer from a GGUF file's metadata; `chat_template` replaces the one in it."""
        return cls(from_gguf(metadata), chat_template)

    def check_chat_template(self) -> None:
        """Start what renders conversations, which otherwise the first one does. Raises ModelError for a template that
        cannot be used."""
        for template in self._templates.all:
            template.check()

    def release_memory(self) -> None:
        """Free the memory that the next text can compute again: all except the texts of tokens."""
        for table in (self.table, self.whole_table):
            table.forget()
        self._backend.release_memory()

    def wake(self) -> None:
        """Load the tokenizer in this thread, as the next text would (`text.backend`)."""
        self._backend.whole()

    @property
    def vocab_size(self) -> int:
        """Ids that have a spelling; the model's own vocabulary may be padded beyond."""
        return len(self.table)

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False, max_tokens: int | None = None
    ) -> list[int]:
        """`add_special_tokens` adds what the checkpoint puts around a prompt (often a begin token), `parse_special`
        turns the spellings of control tokens into these tokens. Raises RequestTooLarge for a text that cannot fit into
        `max_tokens`, before any work is done, and InvalidRequest for lone surrogates."""
        _check_text(text, max_tokens)
        ids = self._encode(text, add_special_tokens, plain=not parse_special).ids
        return self._framed(ids) if add_special_tokens else ids

    def encode_pair(self, first: str, second: str, *, max_tokens: int | None = None) -> tuple[list[int], list[int]]:
        """Return the ids of two texts with the checkpoint's tokens around them, and of each id the kind: 0 of the
        first text, 1 of the second, as the tokenizer has it. Spellings of control tokens are text. Raises as
        `encode`."""
        for text in (first, second):
            _check_text(text, max_tokens)
        plain = any(map(self._may_be_control, (first, second)))
        backend = self._backend.literal() if plain else self._backend.whole()
        (encoded,) = backend.encode_batch([(first, second)], add_special_tokens=True)
        return list(encoded.ids), list(encoded.type_ids)

    def added_id(self, spelled: str) -> int | None:
        """Return the id of an added token by its spelling; None for any other text."""
        return self._added.get(spelled)

    def control_at(self, text: str) -> str:
        """Return the spelling of the control token that `text` begins with; "" if it begins with none."""
        found = self._control.match(text)
        return found[0] if found else ""

    def spellings(self, words: Iterable[str | tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        """The tokens of each word, as it is and with a space before it, control tokens among them. Tokens stay."""
        found: dict[tuple[int, ...], None] = {}
        encode = partial(self.encode, add_special_tokens=False, parse_special=True)
        for word in words:
            texts = (word, " " + word.lstrip()) if isinstance(word, str) else ()
            found |= dict.fromkeys(map(tuple, map(encode, texts)))
            found |= {word: None} if isinstance(word, tuple) else {}
        return tuple(word for word in found if word)

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        max_tokens: int | None = None,
        **variables: Any,
    ) -> list[int]:
        """Render and encode a conversation; with `continue_final_message` up to the end of the last message, which is
        the assistant's. Raises InvalidRequest if there is no template, or it refuses."""
        mark, guarded, variables = self._guard(messages, variables, max_tokens)
        end = mark if continue_final_message else None
        text = self._render_guarded(guarded, add_generation_prompt, max_tokens, variables, end)
        return self._encode_rendered(text, mark, with_ends=False).ids

    def chat_text(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        max_tokens: int | None = None,
        **variables: Any,
    ) -> str:
        """Return the text whose tokens `encode_chat` returns. It spells control tokens as the template does."""
        mark, guarded, variables = self._guard(messages, variables, max_tokens)
        end = mark if continue_final_message else None
        return self._render_guarded(guarded, add_generation_prompt, max_tokens, variables, end).replace(mark, "")

    def encode_chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        breakpoints: Sequence[Breakpoint] = (),
        marks_alone: bool = False,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        max_tokens: int | None = None,
        **variables: Any,
    ) -> ChatPrompt:
        """As `encode_chat`, with the lengths from which later requests are likely to continue. `breakpoints` are the
        client's own, with `marks_alone` the only ones; see `text.resumption`. Takes about twice the time."""
        mark, guarded, variables = self._guard(messages, variables, max_tokens)
        end = mark if continue_final_message else None
        text = self._render_guarded(guarded, add_generation_prompt, max_tokens, variables, end)
        marked = [
            point._replace(num_chars=_with_marks(guarded[point.message]["content"] or "", mark, point.num_chars))
            for point in breakpoints
        ]
        deadline = time.monotonic() + MAX_PLACES_S

        def render(varied: list[Message]) -> str:
            if time.monotonic() > deadline:
                raise InvalidRequest("the chat template is too slow for more renderings", code="chat_template_error")
            return self.render(varied, add_generation_prompt=False, **variables)

        found = places(text, guarded, marked, render, marks_alone=marks_alone)
        ids, ends = self._encode_rendered(text, mark, with_ends=True)
        points = token_counts(ends, [place - text.count(mark, 0, place) for place in found.points])
        counts = [bisect_right(ends, place - text.count(mark, 0, place)) for place in found.marks]
        return ChatPrompt(ids, points, counts)

    def _render_guarded(
        self,
        guarded: list[Message],
        add_generation_prompt: bool,
        max_tokens: int | None,
        variables: dict[str, Any],
        end: str | None,
    ) -> str:
        """Render the guarded messages. `end` is given if the last message is to be continued; it occurs nowhere twice
        in a row."""
        if end is None:
            text = self.render(guarded, add_generation_prompt=add_generation_prompt, **variables)
        else:
            guarded = [*guarded[:-1], _opened(guarded[-1], 2 * end)]
            text, found, _ = self.render(guarded, add_generation_prompt=False, **variables).rpartition(2 * end)
            if not found:
                raise InvalidRequest(
                    "the chat template does not render the last message's text: it cannot be continued",
                    code="chat_template_error",
                    param="continue_final_message",
                )
        _check_text(text, None if max_tokens is None else max_tokens + len(text) // MAX_BYTES_PER_TOKEN)
        return text

    def _encode_rendered(self, text: str, mark: str, *, with_ends: bool) -> _Encoded:
        """Encode the text of a template; `ends` count no marks. Templates write the begin token themselves."""
        if mark not in text:
            return self._encode(text, add_special_tokens=False, plain=False, with_ends=with_ends)
        ids: list[int] = []
        ends: list[int] = []
        begin = 0
        for part, is_control in _split(text, self._control):
            unmarked = part.replace(mark, "")
            if is_control:
                encoded = _Encoded([self._added[part]], [len(part)])
            else:
                encoded = self._encode(unmarked, add_special_tokens=False, plain=True, with_ends=with_ends)
            ids += encoded.ids
            ends += [begin + end for end in encoded.ends]
            begin += len(unmarked)
        return _Encoded(ids, ends)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any) -> str:
        """The text of a conversation, control tokens spelled out."""
        template = self._templates.fitting(variables)
        if template is None:
            raise InvalidRequest(
                "this model has no chat template: use /v1/completions, or start the server with --chat-template",
                code="no_chat_template",
            )
        if (image := self.image_text) is None:
            return template.render(list(messages), add_generation_prompt=add_generation_prompt, **variables)
        shown = [_with_images(message, template, image) for message in messages]
        text = template.render(shown, add_generation_prompt=add_generation_prompt, **variables)
        # Tokens depend on the text around them, so this comes before the conversation is encoded.
        return text.replace(image.token, image.framed)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Return a whole text, without the space that encoding puts in front."""
        text = decode(self.table, token_ids, skip_special=skip_special_tokens)
        if self._space_prefix and text.startswith(" "):
            return text[1:]
        return text

    def _encode(self, text: str, add_special_tokens: bool, *, plain: bool, with_ends: bool = False) -> _Encoded:
        backend = self._backend.literal() if plain and self._may_be_control(text) else self._backend.whole()
        encode = backend.encode_batch if with_ends else backend.encode_batch_fast
        (encoded,) = encode([text], add_special_tokens=add_special_tokens)
        return _Encoded(list(encoded.ids), [end for _, end in encoded.offsets] if with_ends else [])

    def work_chars(self, text: str) -> int:
        """How much work `encode` has with it at most, as the length of a text."""
        return len(text) if self._backend.has_literal or not self._may_be_control(text) else MAX_WORK_CHARS

    def _may_be_control(self, text: str) -> bool:
        return self._control_is_normalized or self._control.search(text) is not None

    def _framed(self, ids: list[int]) -> list[int]:
        """Return `ids` with the begin and end tokens that a GGUF file asks for, each once."""
        bos, eos = self.bos_token_id, self.eos_token_id
        if self._add_bos and bos is not None and ids[:1] != [bos]:
            ids = [bos, *ids]
        if self._add_eos and eos is not None and ids[-1:] != [eos]:
            ids = [*ids, eos]
        return ids

    def _guard(
        self, messages: Sequence[Message], variables: dict[str, Any], max_tokens: int | None
    ) -> tuple[str, list[Message], dict[str, Any]]:
        """Put a mark that occurs nowhere into every control spelling that messages and variables contain: what the
        template writes is then the only source of control tokens. In what the assistant said, markers that are visible
        text (`</think>`) stay: templates look for them, and the model wrote them itself."""
        texts = list(_texts([*messages, variables]))
        _check_text("\0".join(texts), max_tokens)
        used = {ord(ch) for text in texts for ch in set(text) if ord(ch) >= _MARKS.start}
        for template in self._templates.all:
            used |= set(map(ord, set(template.source)))
        mark = chr(next(code for code in _MARKS if code not in used))
        guarded = []
        for message in messages:
            found = self._hidden if message.get("role") == "assistant" else self._control
            said = message.items()
            guarded.append({key: value if key == "role" else _marked(value, found, mark) for key, value in said})
        return mark, guarded, _marked(variables, self._control, mark)


def _with_images(message: Message, template: ChatTemplate, image: ImageText) -> Message:
    """Return the message with its images as text, if the template writes none."""
    content = message.get("content")
    if not isinstance(content, list) or template.writes_images(image.token):
        return message
    said = "".join(image.written if part["type"] == "image" else part["text"] for part in content)
    return {**message, "content": said}


def _opened(message: Message, end: str) -> Message:
    """With an `end` behind its words."""
    if message.get("role") != "assistant" or not isinstance(message.get("content"), str):
        what = f"the last message is the {message.get('role')}'s, or has no words: only the assistant's is gone on with"
        raise InvalidRequest(what, code="invalid_combination", param="continue_final_message")
    return {**message, "content": message["content"] + end}


def _texts(value: Any) -> Iterable[str]:
    """All in it, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inside in value.items():
            yield from (key, *_texts(inside))
    elif isinstance(value, list):
        for inside in value:
            yield from _texts(inside)


def _marked(value: Any, spellings: re.Pattern[str], mark: str) -> Any:
    """Return `value` with a mark in every occurrence of `spellings`, also inside lists and objects."""
    if isinstance(value, str):
        return spellings.sub(lambda match: match[0][:1] + mark + match[0][1:], value)
    if isinstance(value, dict):
        return {_marked(key, spellings, mark): _marked(inside, spellings, mark) for key, inside in value.items()}
    return [_marked(inside, spellings, mark) for inside in value] if isinstance(value, list) else value


def _with_marks(content: Content, mark: str, num_chars: int) -> int:
    """Return the position in `content` behind `num_chars` characters, not counting marks."""
    at = 0
    for text in [content] if isinstance(content, str) else (part.get("text", "-" * IMAGE_CHARS) for part in content):
        for i, part in enumerate(text.split(mark)):
            at += len(mark) if i else 0
            if num_chars <= len(part):
                return at + num_chars
            num_chars -= len(part)
            at += len(part)
    return at


def _split(text: str, spellings: re.Pattern[str]) -> Iterable[tuple[str, bool]]:
    """The text's parts in order, and whether each is one of the spellings."""
    at = 0
    for match in spellings.finditer(text):
        if match.start() > at:
            yield text[at : match.start()], False
        yield match[0], True
        at = match.end()
    if at < len(text):
        yield text[at:], False


def _check_text(text: str, max_tokens: int | None) -> None:
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"the text has a lone surrogate at character {error.start}: it is not valid Unicode", code="invalid_unicode"
        ) from error
    if max_tokens is not None and num_bytes > max_tokens * MAX_BYTES_PER_TOKEN:
        raise RequestTooLarge(
            f"the prompt has {num_bytes} bytes; at most {max_tokens * MAX_BYTES_PER_TOKEN} "
            f"({MAX_BYTES_PER_TOKEN} per token of the {max_tokens}-token context) are read: shorten it"
        )
