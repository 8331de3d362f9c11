"""`forebay models make`: what it writes can be served, and what it cannot write is said in one line."""

from __future__ import annotations

from pathlib import Path

import jinja2
import pytest

from forebay.cli.main import main
from forebay.families.checkpoint import open_checkpoint
from forebay.families.small_pictures import SMALL, WITH_PICTURES, template
from forebay.server.images.expansion import Expansion
from forebay.server.images.tiling import tiling_at
from forebay.text.tokenizer import Tokenizer
from forebay.text.tokenizer_files import from_path

SIZES = ["--hidden-size", "32", "--num-layers", "3"]


def test_it_writes_a_folder_that_can_be_opened(
    tmp_path: Path, embedded_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "new" / "tiny"
    words = ["models", "make", "--like", "lfm2", "--out", str(target), *SIZES, "--set", "conv_L_cache=4", "tiny"]
    assert main(words) == 0
    captured = capsys.readouterr()
    assert captured.out.strip() == str(target)
    assert "lfm2: 3 layers, 1.6 M weights, 3.1 MiB" in captured.err
    checkpoint = open_checkpoint(target)
    assert (checkpoint.config.num_layers, checkpoint.config.conv_width) == (3, 4)
    assert len(checkpoint.config.eos_token_ids) > 0
    chat = [{"role": "user", "content": "hello"}]
    assert Tokenizer.from_path(target).encode_chat(chat) == Tokenizer.from_path(embedded_model).encode_chat(chat)
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["x"], "--like"),
        (["--like", "lfm2"], "plain name"),
        (["a/b", "--like", "lfm2"], "plain name"),
        (["x", "--like", "gpt2"], "no small model like 'gpt2'"),
        (["x", "--like", "lfm2", "--out", "{taken}"], "is there already"),
        (["x", "--like", "lfm2", "--out", "{new}", "--hidden-size", "100"], "100 does not divide"),
        (["x", "--like", "lfm2", "--out", "{new}", "--set", "conv_L_cache"], "FIELD=VALUE"),
        (["x", "--like", "lfm2", "--out", "{new}", "--set", "conv_L_cache=1"], "conv_L_cache"),
        (["x", "--like", "lfm2", "--out", "{new}", "--dtype", "int8"], "--dtype"),
        (["x", "--like", "lfm2", "--out", "/proc/new"], "cannot be written"),
    ],
)
def test_what_cannot_be_made_is_said_and_leaves_nothing(
    words: list[str], message: str, tmp_path: Path, embedded_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    paths = {"taken": str(taken), "new": str(tmp_path / "new")}
    assert main(["models", "make", *(word.format(**paths) for word in words)]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [taken]
    assert list(taken.iterdir()) == []


@pytest.mark.long
@pytest.mark.quick(1)
@pytest.mark.parametrize("model_type", WITH_PICTURES)
def test_model_that_reads_images_comes_with_its_encoder_tokens_and_processors(
    model_type: str, tmp_path: Path, embedded_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "tiny"
    assert main(["models", "make", "--like", model_type, "--out", str(target), *SIZES]) == 0
    checkpoint, tokenizer = open_checkpoint(target), from_path(target)
    text_tokens = open_checkpoint(embedded_model).config.vocab_size
    vision = checkpoint.config.vision
    assert vision is not None
    num_layers = 1 if model_type == "gemma4_unified" else 3  # it has no encoder
    assert (vision.kind, vision.num_layers) == (model_type, num_layers)
    assert 4 <= vision.max_tokens < 100
    assert vision.placeholder == text_tokens
    assert len(checkpoint.config.eos_token_ids) > 0
    tokens = SMALL[model_type].tokens
    ids = [tokenizer.added[token] for token in tokens]
    assert ids == list(range(text_tokens, text_tokens + len(tokens)))
    assert tokenizer.control >= set(ids)
    assert checkpoint.config.vocab_size == text_tokens + len(tokens)
    tiling = tiling_at(str(target))
    assert tiling is not None
    Expansion(Tokenizer.from_path(target), tiling)
    capsys.readouterr()
    assert main(["models", "inspect", str(target)]) == 0
    layers = "1 layer" if num_layers == 1 else f"{num_layers} layers"
    assert f"{vision.tiles}; an encoder of {layers} of width 32" in capsys.readouterr().out


@pytest.mark.parametrize(("model_type", "written"), [("smolvlm", "<image>"), ("gemma3", "<start_of_image>")])
def test_template_of_a_model_that_reads_images_writes_a_token_for_each(model_type: str, written: str) -> None:
    parts = [{"type": "image"}, {"type": "text", "text": "a"}, {"type": "image"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "b\n"}]
    text = jinja2.Template(template(model_type)).render(messages=messages, add_generation_prompt=True)
    assert text == (
        f"<|im_start|>user\n{written}a{written}<|im_end|>\n<|im_start|>assistant\nb\n<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_show_ends_with_the_equations_of_the_encoder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "show", "smolvlm"]) == 0
    text, _, encoder = capsys.readouterr().out.partition("\nimages:\n")
    assert "logits = head(norm(x))" in text
    assert "x = W patch + b + position[patch]  (a tile has 64 patches of 8 x 8 pixels)" in encoder
    assert "layers 0-7:" in encoder
    assert "8 heads of 64" in encoder
    assert encoder.rstrip().endswith("embedding[image] = W layernorm(x) of 2 x 2 patches  (16 tokens a tile)")
