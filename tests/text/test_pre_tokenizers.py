"""Each name of `tokenizer.ggml.pre`: the words of 2,000 strings, as another engine cuts them by llama.cpp's table.

The expressions here are written out once more, for the package `regex`, and cut as llama.cpp does: an expression after
the other, each in the pieces of the one before, with what lies between matches as pieces of their own.
"""

from __future__ import annotations

import functools
import random
import unicodedata
from collections.abc import Callable
from typing import Any

import pytest
import regex
from tokenizers import Tokenizer as Package
from tokenizers import pre_tokenizers
from transformers.models.cohere.tokenization_cohere import CohereTokenizer
from transformers.models.gpt2.tokenization_gpt2 import GPT2Tokenizer
from transformers.models.gpt_neox.tokenization_gpt_neox import GPTNeoXTokenizer
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

from forebay.base.errors import ModelError
from forebay.formats.strings import Strings
from forebay.text.gguf_tokenizer import from_gguf
from forebay.text.pre_tokenizers import WORDS, pre_tokenizer
from forebay.text.token_bytes import byte_level
from forebay.text.tokenizer import Tokenizer
from tests.text.tiny_tokenizer import CONTROL, tiny_metadata

NUM_STRINGS = 2000
PARTS = [
    *"aZéÉßñ", "hello", "World", "McDonald", "ÉTUDE", "ΑΒγ", "Жук", "कि", "ไทย", "你好", "かな", "カナ", "한국",
    "ㄅㄆ", "𐐀𐐨", "العربية", "עברית", "ʰ", "1", "23", "456", "7890", "٣٤", "²", "Ⅷ", "½",
    "'s", "'T", "'ll", "'RE", "’s", "'x", " ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", "\u00a0", "\u3000", "\u2028",
    ".", ",", "!", "?", "...", "—", "“", "。", "，", "(", ")", "[", "]", "{", "|", "/", "//", "\\", "$", "+", "<=",
    ">", "^", "~", "`", "_", "-", "#", "@", "%", "&", "e\u0301", "\u0301", "a\u0308\u0323", "\u200d", "\ufe0f",
    "👩\u200d💻", "🎉", "🦙", "€", "©", "\ue000", "\x00", "\x7f", "<sentinel:12>", "IMGIMGABCZ",
]  # fmt: skip

C = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = C + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + TAIL
QWEN2 = C + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + TAIL
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CAPITALS, SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{CAPITALS}*{SMALL}+{C}?|[^\r\n\p{{L}}\p{{N}}]?{CAPITALS}+{SMALL}*{C}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + TAIL
)
TEKKEN = O200K.replace(C + "?", "").replace("{1,3}", "")
NO_HAN = [r"[[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]--\p{Han}]", r"[[\p{Ll}\p{Lm}\p{Lo}\p{M}]--\p{Han}]"]
KIMI = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{NO_HAN[0]}*{NO_HAN[1]}+{C}?|[^\r\n\p{{L}}\p{{N}}]?{NO_HAN[0]}+{NO_HAN[1]}*{C}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + TAIL
)
CJK = "[一-龥\u3040-ゟ゠-ヿ]+"
DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]\^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*" + TAIL
)
FINNISH = " ?[^(\\s|.,!?…。，、।۔،)]+"
DIGITS = [r"\p{N}", GPT2]
JAIS = LLAMA3.removesuffix(r"|\s+(?!\S)|\s+") + (
    r"|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)"
    r"|\s{1,2}(?!\S)|\s{1}"
)
ASIAN = "[一-龥\u0800-一가-\ud7ff]+"
_ORACLE: list[tuple[str, list[str]]] = [
    ("default", [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"]),
    ("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano", [LLAMA3]),
    ("dbrx smaug-bpe chatglm-bpe glm4 glm5", [LLAMA3]),
    ("minicpm5", [r"\p{N}{1,3}", LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}+")]),
    ("jais-2", [JAIS]),
    ("qwen2 deepseek-r1-qwen f2llmv2 kormo stablelm2 megrez hunyuan solar-open grok-2", [QWEN2]),
    ("qwen35", [C + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + TAIL]),
    ("ufakzeka", [QWEN2.removeprefix(C + "|")]),
    ("laguna", [r"[^\n]+|[\n]+", QWEN2]),
    (
        "bailingmoe bailingmoe2 llada-moe",
        [r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"],
    ),
    ("seed-coder", [C + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+" + TAIL]),
    (
        "exaone-moe",
        [
            C + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]"
            r"|\s+(?!\S)|\s+"
        ],
    ),
    ("tekken", [TEKKEN]),
    ("gpt-4o llama4 kanana2 talkie minimax-m2 granite-embed-multi-97m", [O200K]),
    # `\b` behind a digit, with the characters of a word that tokenizer.json's engine has.
    ("tiny_aya cohere2moe", [r"\d{1,3}(?=(?:\d{3})*(?![\p{L}\p{M}\p{N}\p{Pc}]))", O200K]),
    ("kimi-k2", [KIMI]),
    ("youtu", [f"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|{CJK}", O200K.replace(r"\p{N}{1,3}", r"\p{N}")]),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", [r"\p{N}{1,3}", CJK, DEEPSEEK]),
    ("spark2_5", [r"\p{N}{1,3}", CJK, DEEPSEEK.replace(r"]+[\r\n]*|\s*[\r\n]+", r"]+|[\r\n]"), r"\p{N}"]),
    (
        "deepseek-llm",  # whose list of letters is, of those in `PARTS`, the cased ones
        [r"[\r\n]", r"\s?[\p{Lu}\p{Ll}]+", "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+", r"\s+$", ASIAN, r"\p{N}+"],
    ),
    ("deepseek-coder", [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", ASIAN, r"\p{N}"]),
    ("falcon", [r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"]),
    ("starcoder refact smollm codeshell exaone minerva-7b mellum2 command-r", DIGITS),
    ("gpt-2 gpt2 phi-2 jina-en jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe", [GPT2]),
    ("gigachat a.x-4.0 mellum exaone4 jais trillion granite-docling mpt olmo modern-bert", [GPT2]),
    ("superbpe", [r"\p{N}+", r"(?=(?:\d{3})+(?!\d))"]),
    ("poro-chat bloom gpt3-finnish", [FINNISH]),
    ("viking", [FINNISH, r"\p{N}"]),
    (
        "chameleon",
        [
            "<sentinel:[0-9]+>",
            "(?:IMGIMG)(?:(?:A|B|C|D|E|F|G|H|I){1,4})Z",
            r"(?:[\t\n]|    |  )",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            GPT2,
        ],
    ),
]
ORACLE = {name: steps for names, steps in _ORACLE for name in names.split()}
WHOLE_TEXT = {"gemma4", "granite-embed-multi-311m", "sarvam-moe", "whitespace"}
AFMOE = "[一-鿿㐀-䶿豈-\ufaff\u3040-ゟ゠-ヿ･-ﾟ⼀-\u2fdf\u0e40-\u0e7f\u0e80-\u0effក-\u17ffက-႟ꩠ-ꩿꧠ-\ua9ff가-\ud7afᄀ-ᇿ]+"


@pytest.fixture(scope="module")
def strings() -> list[str]:
    rng = random.Random(49)
    return ["".join(rng.choices(PARTS, k=rng.randint(1, 12))) for _ in range(NUM_STRINGS)]


def cut(text: str, steps: list[str]) -> list[str]:
    pieces = [text]
    for step in steps:
        expression = regex.compile(step, regex.V1)
        found = []
        for piece in pieces:
            at = 0
            for match in expression.finditer(piece):
                found += [piece[at : match.start()], match[0]]
                at = match.end()
            found.append(piece[at:])
        pieces = [piece for piece in found if piece]
    return pieces


@functools.cache
def _built(pre: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizer(WORDS[pre])


def words(pre: str, text: str) -> list[str]:
    pieces = _built(pre).pre_tokenize_str(text)
    return [byte_level(piece).decode() for piece, _ in pieces]


def test_pre_tokenizers_every_name_of_the_table_has_its_oracle() -> None:
    assert WORDS.keys() == {*ORACLE, *WHOLE_TEXT, "afmoe"}


@pytest.mark.parametrize("pre", sorted({repr(steps): name for name, steps in ORACLE.items()}.values()))
def test_pre_tokenizer_random_strings_have_the_words_of_another_engine(pre: str, strings: list[str]) -> None:
    for text in strings:
        assert words(pre, text) == cut(text, ORACLE[pre]), repr(text)


def test_pre_tokenizer_names_with_equal_oracles_have_equal_steps() -> None:
    by_oracle: dict[str, set[tuple[str, ...]]] = {}
    for name, steps in ORACLE.items():
        by_oracle.setdefault(repr(steps), set()).add(WORDS[name].steps)
    assert all(len(steps) == 1 for steps in by_oracle.values())


def test_pre_tokenizer_afmoe_groups_digits_from_the_end(strings: list[str]) -> None:
    def grouped(piece: str) -> list[str]:
        if not regex.fullmatch(r"\p{N}+", piece):
            return [piece]
        first = len(piece) % 3
        return [part for part in (piece[:first], *(piece[i : i + 3] for i in range(first, len(piece), 3))) if part]

    for text in strings:
        numbers = [part for piece in cut(text, [r"\p{N}+"]) for part in grouped(piece)]
        assert words("afmoe", text) == [word for part in numbers for word in cut(part, [AFMOE, DEEPSEEK])], repr(text)


OF_TRANSFORMERS: dict[str, tuple[Callable[..., Any], str]] = {
    "qwen2": (Qwen2Tokenizer, "qwen2"),
    "qwen35": (Qwen3_5Tokenizer, "qwen35"),
    "gpt-2": (GPT2Tokenizer, "gpt-2"),
    "command-r": (CohereTokenizer, "command-r"),
    "olmo": (GPTNeoXTokenizer, "olmo"),
}


@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_gguf_tokenizer_has_the_words_of_the_family_in_transformers(name: str, strings: list[str]) -> None:
    kind, pre = OF_TRANSFORMERS[name]
    theirs: Package = kind(vocab={"a": 0}, merges=[])._tokenizer
    ours = from_gguf({**tiny_metadata(600), "tokenizer.ggml.pre": pre}).backend

    def pieces(backend: Package, text: str) -> list[str]:
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        return [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)]

    for text in strings:
        assert pieces(ours, text) == pieces(theirs, text), repr(text)


@pytest.mark.parametrize("pre", sorted(WORDS))
def test_gguf_tokenizer_of_every_name_encodes_and_gives_the_text_back(pre: str) -> None:
    tokenizer = Tokenizer.from_gguf(spaced_metadata(pre) if pre in WHOLE_TEXT else byte_metadata(pre))
    for text in ("hello world", "a 123'LL\n\n été", "你好 e\u0301 <|im_end|>"):
        expected = unicodedata.normalize("NFC", text) if WORDS[pre].nfc else text
        expected = "".join(expected.split()) if pre == "whitespace" else expected
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == expected
        assert (ids[:1] == [1]) == WORDS[pre].add_bos, "as the file does not say"


def byte_metadata(pre: str) -> dict[str, Any]:
    given = {key: value for key, value in tiny_metadata(600).items() if key != "tokenizer.ggml.add_bos_token"}
    return {**given, "tokenizer.ggml.pre": pre}


def spaced_metadata(pre: str, model: str = "gpt2") -> dict[str, Any]:
    pieces = [
        *CONTROL,
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"helo",
        "he",
        "ll",
        "hell",
        "hello",
        "▁hello",
    ]
    return {
        **byte_metadata(pre),
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.tokens": Strings.of(pieces),
        "tokenizer.ggml.token_type": [3] * 3 + [6] * 256 + [1] * (len(pieces) - 259),
        "tokenizer.ggml.merges": Strings.of(["h e", "l l", "he ll", "hell o", "▁ hello"]),
    }


def test_gguf_tokenizer_of_gemma4_merges_over_spaces_and_falls_back_to_bytes() -> None:
    metadata = spaced_metadata("something else", model="gemma4")  # the model decides, as in llama.cpp
    tokenizer = Tokenizer.from_gguf({**metadata, "tokenizer.ggml.add_bos_token": False})  # which early files say
    ids = tokenizer.encode("hello hello é")
    pieces = metadata["tokenizer.ggml.tokens"]
    assert [pieces[i] for i in ids] == ["<|im_start|>", "hello", "▁hello", "▁", "<0xC3>", "<0xA9>"]


@pytest.mark.parametrize(("pre", "whole"), [("lfm2", True), ("glm4", True), ("tekken", True), ("qwen2", False)])
def test_gguf_tokenizer_whole_words_are_not_merged(pre: str, whole: bool) -> None:
    """Of a word that is a token and that no merge makes."""
    backend = from_gguf({**tiny_metadata(600), "tokenizer.ggml.pre": pre}).backend
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    assert (len(backend.encode(" w7").ids) == 1) == whole


def test_gguf_tokenizer_kimi_without_merges_joins_the_lowest_id_first() -> None:
    pieces = [*CONTROL, *"abc", "ab", "bc", "abc"]
    metadata = {**tiny_metadata(600), "tokenizer.ggml.pre": "kimi-k2", "tokenizer.ggml.tokens": Strings.of(pieces)}
    metadata |= {"tokenizer.ggml.token_type": [3, 3, 3] + [1] * 6}
    del metadata["tokenizer.ggml.merges"]
    assert Tokenizer.from_gguf(metadata).encode("abc", add_special_tokens=False) == [8]
    assert Tokenizer.from_gguf(metadata).encode("bc", add_special_tokens=False) == [7]
    with pytest.raises(ModelError, match="merges is missing"):
        Tokenizer.from_gguf({**metadata, "tokenizer.ggml.pre": "qwen2"})


@pytest.mark.parametrize("pre", ["klingon", 7, None])
def test_gguf_tokenizer_unknown_name_is_refused_with_the_known_ones(pre: Any) -> None:
    with pytest.raises(ModelError, match=r"known are .*qwen2"):
        from_gguf({**tiny_metadata(600), "tokenizer.ggml.pre": pre})


def test_gguf_tokenizer_keys_for_pairs_and_normalizers_are_checked() -> None:
    metadata = tiny_metadata(600)
    from_gguf({**metadata, "tokenizer.ggml.add_sep_token": True})
    with pytest.raises(ModelError, match=r"add_sep_token is 3"):
        from_gguf({**metadata, "tokenizer.ggml.add_sep_token": 3})
    lower = {**spaced_metadata("whitespace", model="whitespace"), "tokenizer.ggml.normalizer.lowercase": True}
    with pytest.raises(ModelError, match=r"normalizer.lowercase is true"):
        from_gguf(lower)


@pytest.mark.parametrize("name", ["bos", "eos"])
def test_gguf_tokenizer_token_to_add_is_added_once_or_refused_if_the_file_lacks_it(name: str) -> None:
    metadata = {**tiny_metadata(600), f"tokenizer.ggml.add_{name}_token": True}
    tokenizer = Tokenizer.from_gguf(metadata)
    alone = tokenizer.encode("hello", add_special_tokens=False)
    expected = [1, *alone] if name == "bos" else [*alone, 2]
    assert tokenizer.encode("hello") == expected
    written = "<|im_start|>hello" if name == "bos" else "hello<|im_end|>"
    assert tokenizer.encode(written, parse_special=True) == expected
    del metadata[f"tokenizer.ggml.{name}_token_id"]
    with pytest.raises(ModelError, match=f"add_{name}_token is true"):
        from_gguf(metadata)
