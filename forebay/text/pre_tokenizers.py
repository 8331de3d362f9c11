r"""How a GGUF names its way of cutting text into words (`tokenizer.ggml.pre`), as `tokenizers` building blocks.

The names are those of llama.cpp's `llama-vocab.cpp`. The expressions are those of each family's published
tokenizer.json, which llama.cpp's approximate where its own engine lacks a feature (`(?i:`, `&&`, `\p{Lu}`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from tokenizers import Regex, pre_tokenizers

from forebay.base.errors import ModelError, brief

_CONTRACTIONS: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES: Final = r"|\s+(?!\S)|\s+"
_LINES: Final = r"|\s*[\r\n]+" + _SPACES
_SIGNS: Final = r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
_WORD: Final = r"[^\r\n\p{L}\p{N}]?\p{L}+"

_LLAMA3: Final = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}{_SIGNS}{_LINES}"
_QWEN2: Final = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{_SIGNS}{_LINES}"
_QWEN35: Final = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*{_LINES}"
)
_JAIS2: Final = (
    rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}{_SIGNS}|\s*[\r\n]+"
    + "".join(rf"|\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4))
    + r"|\s{1,2}(?!\S)|\s{1}"
)
_BAILING: Final = (
    rf"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{{L}}\p{{N}}]?+\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]++[\r\n]*|\s*[\r\n]{_SPACES}"
)
_SEED: Final = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+{_LINES}"
_EXAONE_MOE: Final = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]{_SPACES}"
)

_HIGH: Final = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_LOW: Final = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _cased(ending: str, others: str, but: str = "") -> str:
    """Return an expression for words that end before a capital letter, without the characters of `but`."""
    high, low, before = f"[{_HIGH}{but}]", f"[{_LOW}{but}]", r"[^\r\n\p{L}\p{N}]?"
    return f"{before}{high}*{low}+{ending}|{before}{high}+{low}*{ending}|{others}"


_PATHS: Final = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _LINES
_TEKKEN: Final = _cased("", r"\p{N}" + _PATHS)
_O200K: Final = _cased(_CONTRACTIONS + "?", r"\p{N}{1,3}" + _PATHS)
_KIMI: Final = r"\p{Han}+|" + _cased(_CONTRACTIONS + "?", rf"\p{{N}}{{1,3}}{_SIGNS}{_LINES}", r"&&[^\p{Han}]")
_YOUTU: Final = _cased(_CONTRACTIONS + "?", r"\p{N}" + _PATHS)

# DeepSeek's: numbers first, then Chinese and Japanese, then the rest.
_CJK: Final = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_ASIAN: Final = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_MARKED: Final = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
_DEEPSEEK3: Final = rf"{_MARKED}| ?[\p{{P}}\p{{S}}]+[\r\n]*{_LINES}"
_SPARK: Final = rf"{_MARKED}| ?[\p{{P}}\p{{S}}]+|[\r\n]{_SPACES}"
_DEEPSEEK_LETTERS: Final = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-"
    "\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    "\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_SIGNS: Final = "[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_EAST: Final = (  # AFMoE's scripts that are written without spaces
    "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
    "\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_BLOCKS: Final = (  # Youtu's: Korean, full-width punctuation, Bopomofo, Chinese and Japanese
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-"
    f"\ufe4f]+|[\u3105-\u312f]+|{_CJK}"
)

_THREES: Final = r"\A\p{N}{1,2}(?=(?:\p{N}{3})*\z)|\p{N}{3}"  # of a number that stands alone, counted from its end
_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+" + _SPACES
_SHORT: Final = r"\p{N}{1,3}"
_PUNCTUATION: Final = r"[\p{P}$+<=>^~|`]+"
_NEWLINES: Final = r"[^\n]+|\n+"
_FINNISH: Final = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """A way of cutting text into words. Each of `steps` isolates what it matches in the pieces of the one before.

    `byte_level`: pieces are spelled in GPT-2's letters for bytes; otherwise in text, with U+2581 for a space and
    `<0x0A>` for a byte. `spaces`: they are part of the text, not only between words. `nfc`: text is normalized first.
    `whole_words`: a word that is a token is not merged. `add_bos`: a begin token comes before a text if the file does
    not say.
    """

    steps: tuple[str, ...] = ()
    byte_level: bool = True
    spaces: bool = True
    nfc: bool = False
    whole_words: bool = False
    add_bos: bool = False


_LLAMA3_WORDS: Final = Words(steps=(_LLAMA3,), whole_words=True, add_bos=True)
_GPT2_WORDS: Final = Words(steps=(_GPT2,))
_NEOX_WORDS: Final = Words(steps=(_GPT2,), nfc=True)
_DIGIT_WORDS: Final = Words(steps=(r"\p{N}", _GPT2))
_QWEN2_WORDS: Final = Words(steps=(_QWEN2,))
_QWEN2_NFC_WORDS: Final = Words(steps=(_QWEN2,), nfc=True)
_O200K_WORDS: Final = Words(steps=(_O200K,))
_DEEPSEEK3_WORDS: Final = Words(steps=(_SHORT, _CJK, _DEEPSEEK3))
_FINNISH_WORDS: Final = Words(steps=(_FINNISH,))

_NAMES: Final[tuple[tuple[str, Words], ...]] = (
    ("default", Words(steps=(_PUNCTUATION.replace("`", ""), _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))),
    ("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano", _LLAMA3_WORDS),
    ("smaug-bpe dbrx chatglm-bpe", Words(steps=(_LLAMA3,))),
    ("glm4 glm5", Words(steps=(_LLAMA3,), whole_words=True)),
    ("minicpm5", Words(steps=(_SHORT, _LLAMA3.replace("{1,3}", "+")), whole_words=True)),
    ("jais-2", Words(steps=(_JAIS2,))),
    ("qwen2 deepseek-r1-qwen f2llmv2", _QWEN2_NFC_WORDS),
    ("qwen35", Words(steps=(_QWEN35,), nfc=True)),
    ("kormo stablelm2 megrez hunyuan solar-open grok-2", _QWEN2_WORDS),
    ("ufakzeka", Words(steps=(_QWEN2.removeprefix(_CONTRACTIONS + "|"),))),
    ("laguna", Words(steps=(_NEWLINES, _QWEN2))),
    ("bailingmoe bailingmoe2 llada-moe", Words(steps=(_BAILING,))),
    ("seed-coder", Words(steps=(_SEED,))),
    ("exaone-moe", Words(steps=(_EXAONE_MOE,))),
    ("tekken", Words(steps=(_TEKKEN,), whole_words=True, add_bos=True)),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", _O200K_WORDS),
    ("granite-embed-multi-97m", Words(steps=(_O200K,), whole_words=True)),
    ("tiny_aya cohere2moe", Words(steps=(r"\d{1,3}(?=(?:\d{3})*\b)", _O200K))),
    ("kimi-k2", Words(steps=(_KIMI,))),
    ("youtu", Words(steps=(_BLOCKS, _YOUTU), whole_words=True)),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", _DEEPSEEK3_WORDS),
    ("spark2_5", Words(steps=(_SHORT, _CJK, _SPARK, r"\p{N}"))),
    ("afmoe", Words(steps=(r"\p{N}+", _THREES, _EAST, _DEEPSEEK3))),
    (
        "deepseek-llm",
        Words(
            steps=(r"[\r\n]", rf"\s?[{_DEEPSEEK_LETTERS}]+", rf"\s?{_DEEPSEEK_SIGNS}", r"\s+$", _ASIAN, r"\p{N}+"),
        ),
    ),
    ("deepseek-coder", Words(steps=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _ASIAN, r"\p{N}"))),
    ("falcon", Words(steps=(_PUNCTUATION, _GPT2, "[0-9][0-9][0-9]"))),
    ("starcoder refact smollm codeshell exaone minerva-7b mellum2", _DIGIT_WORDS),
    ("command-r", Words(steps=(r"\p{N}", _GPT2), nfc=True)),
    ("gpt-2 gpt2 phi-2 jina-en jina-es jina-de jina-v2-es jina-v2-de gigachat a.x-4.0 mellum exaone4", _GPT2_WORDS),
    ("jais trillion granite-docling jina-v1-en jina-v2-code roberta-bpe", _GPT2_WORDS),
    ("mpt olmo modern-bert", _NEOX_WORDS),
    ("superbpe", Words(steps=(r"\p{N}+", r"(?=(\d{3})+(?!\d))"))),
    ("poro-chat bloom gpt3-finnish", _FINNISH_WORDS),
    ("viking", Words(steps=(_FINNISH, r"\p{N}"))),
    (
        "chameleon",
        Words(
            steps=(
                "<sentinel:[0-9]+>",
                "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
                r"([\t\n]|    |  )",
                r"\p{N}",
                r"[\p{P}!-/:-@\[-`{-~]",
                _GPT2,
            ),
            add_bos=True,
        ),
    ),
    ("gemma4 granite-embed-multi-311m", Words(byte_level=False, add_bos=True)),
    ("sarvam-moe", Words(byte_level=False)),
    ("whitespace", Words(byte_level=False, spaces=False)),
)
WORDS: Final[Mapping[str, Words]] = MappingProxyType({name: way for names, way in _NAMES for name in names.split()})
"""Each name of `tokenizer.ggml.pre` and what it means."""


def words_of(pre: object) -> Words:
    """Return the way that `pre` names. Raises ModelError for a name that is not known: a guess would give other ids
    without a word."""
    if isinstance(pre, str) and pre in WORDS:
        return WORDS[pre]
    known = ", ".join(sorted(WORDS))
    raise ModelError(f"tokenizer.ggml.pre is {brief(pre)}; known are {known}: use a safetensors folder of this model")


def pre_tokenizer(words: Words) -> pre_tokenizers.PreTokenizer:
    """Return the package's pre-tokenizer, whose pieces are byte-level ones."""
    own = words.steps[-1:] == (_GPT2,)  # the package has this expression itself
    splits = [pre_tokenizers.Split(Regex(step), behavior="isolated") for step in words.steps[: -1 if own else None]]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=own)])
