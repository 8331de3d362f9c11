"""The command line from outside: what it prints and how it exits."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.base.cpu import Cpu
from forebay.base.variants import ARM_VARIANTS, VARIANTS, X86_VARIANTS, Variant
from forebay.cli import doctor_machine
from forebay.cli.arguments import Parser
from forebay.cli.commands import COMMANDS
from forebay.cli.doctor import kernels_finding
from forebay.cli.doctor_machine import Verdict, cpu_finding
from forebay.cli.main import main
from forebay.cli.models import kv_heads
from forebay.config.server_args import FLAGS
from forebay.families.config.model_config import config_of
from forebay.families.small import small_config
from tests.models.text_encoders import shared_encoder, write_tokenizer


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in COMMANDS)


@pytest.mark.whole
@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "bench"])
def test_every_command_has_help_and_does_nothing_else(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main([command, "--help"])
    assert exited.value.code == 0
    assert f"usage: forebay {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serv"], "did you mean serve?"),
        (["run", "x"], "it is `forebay chat MODEL` here"),
        (["pull", "x"], "it is `forebay models pull MODEL` here"),
        (["ps"], "it is `forebay models list` here"),
        (["completion", "tcsh"], "give bash, zsh or fish"),
        (["route", "--prefill", "http://127.0.0.1:1"], "one --decode URL"),
        (["route", "--prefill", "ftp://x", "--decode", "y"], "write http://HOST:PORT"),
        (["pd", "check", "x", "y", "--admin-api-key-file", "/nowhere"], "--admin-api-key-file /nowhere"),
        (["pd", "check", "http://127.0.0.1:1"], "write forebay pd check URL URL"),
        (["serve", "--prot", "1"], "did you mean --port?"),
        (["serve", "--port"], "--port"),
        (["serve", "--port", "many"], "--port"),
        (["serve", "a.gguf", "b.gguf"], "b.gguf"),
        (["serve", "a.gguf", "--model", "b.gguf"], "contradict"),
        (["serve", "/nowhere/model.gguf"], "/nowhere/model.gguf"),
        (["serve", "--host", "192.168.1.1"], "--api-key-file"),
        (["serve", "--port", "70000"], "at most 65535"),
        (["serve", "--ctx-size"], "--ctx-size needs a value: --ctx-size N"),
        (["serve", "--config"], "--config needs a value: --config FILE"),
        (["serve", "--data-parallel-size", "2"], "one machine"),
        (["serve", "--dtype", "half"], "use bfloat16"),
        (["doctor", "--port", "x"], "--port: 'x' is no such number: write a whole number, at least 1, at most 65535"),
        (["bench", "serve", "--request-rate", "x"], "--request-rate: 'x' is no such number"),
        (["bench", "serve", "--request-rate", "nan"], "--request-rate: 'nan'"),
        (["bench", "serve", "--max-concurrency", "0"], "at least 1"),
        (["bench", "serve", "--ignore-eos=1"], "--ignore-eos takes no value"),
        (["bench", "serve", "--backend", "tgi"], "'tgi' is not spoken here, OpenAI's API is: use openai"),
        (["bench", "serve", "--backend", "openai-chat"], "use --endpoint /v1/completions"),
        (["bench", "serve", "--dataset-name", "sonnet"], "the dataset 'sonnet' is not known here: use random or"),
        (["bench", "serve", "--dataset-name", "sharegpt"], "needs --dataset-path FILE"),
        (["bench", "serve", "--goodput", "itl:5"], "write ttft:MS, tpot:MS or e2el:MS"),
        (["bench", "serve", "--percentile-metrics", "ttft,x"], "'x' is none: there are ttft, tpot, itl, e2el"),
        (["bench", "serve", "--metric-percentiles", "50,900"], "are no percentiles"),
        (["bench", "serve", "--random-range-ratio", "0.5"], "--random-input-max"),
        (["bench", "throughput", "--input-len", "0"], "--input-len: '0'"),
        (["bench", "latency", "--random-output-len", "x"], "--random-output-len: 'x'"),
        (["chat", "--max-new-tokens", "0"], "--max-new-tokens: '0'"),
        (
            ["generate", "--max-tokens", "3", "--max-new-tokens", "4"],
            "--max-tokens 3 and --max-new-tokens 4 contradict",
        ),
        (["generate", "--file", "/nowhere", "text"], "give one"),
        (["serve", "--max-num-seqs", "0"], "--max-num-seqs: 0 is too small: at least 1"),
        (["serve", "--flight-recorder", "100"], "--flight-recorder: 100 is too small: at least 1048576, or 0"),
        (["generate", "-p", "a", "b"], "PROMPT, --prompt and --file all say"),
        (["serve", "-n", "5"], "-n 5 is not supported: set max_tokens"),
        (["serve", "-u", "5"], "there is no flag -u"),
        (["serve", "-np5"], "there is no flag -np5"),
        (["serve", "--max-run", "5"], "there is no flag --max-run"),
        (["generate", "-n", "0"], "-n: '0' is no such number"),
        (["models", "push"], "push"),
        (["models", "pull", "x"], "x is no model of the hub"),
        (["models", "rm"], "say which"),
        (["models", "rm", "x"], "no x is here"),
        (["bench", "fast"], "fast"),
        (["generate", "--file", "/nowhere"], "/nowhere"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], embedded_model: Path
) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if line.startswith("forebay: error: ")]
    assert len(lines) == 1
    assert message in lines[0]
    assert captured.out == ""


def test_a_mistake_in_the_words_of_serve_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.cli.serve.spawn", lambda: pytest.fail("a process was started"))
    assert [main(["serve", *words]) for words in (["--prot", "1"], ["--port", "many"], ["a", "b"], ["-dp", "2"])] == [
        2
    ] * 4


def test_no_command_is_a_mistake_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage" in capsys.readouterr().out


def test_a_command_that_cannot_reach_its_server_exits_with_1(
    capsys: pytest.CaptureFixture[str], free_port: int
) -> None:
    assert main(["bench", "serve", "--port", str(free_port)]) == 1
    assert "no server answers" in capsys.readouterr().err


def full_help(word: str) -> str:
    parser = Parser("serve", "", "")
    parser.engine_flags(server=True, model_is_positional=True)
    return parser.help_text(word)


def test_the_short_help_leaves_out_what_is_seldom_needed_and_all_shows_it() -> None:
    assert "--max-header-bytes" not in full_help("")
    whole = full_help("all")
    assert all(flag.option in whole and flag.variable in whole for flag in FLAGS)


def test_other_projects_names_of_a_commands_own_options_are_found_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "--help=max-new-tokens"])
    assert "--max-tokens N" in capsys.readouterr().out


def test_help_says_which_options_are_environment_variables() -> None:
    assert "Settings of the engine and the server (all but `options`)" in full_help("")
    assert "Every flag" not in full_help("")


@pytest.mark.parametrize("word", ["", "all"])
def test_help_fits_into_80_columns(word: str) -> None:
    assert [line for line in full_help(word).splitlines() if len(line) > 80] == []


def test_a_shell_completes_commands_options_and_values(capsys: pytest.CaptureFixture[str]) -> None:
    scripts = {}
    for shell in ("bash", "fish"):
        assert main(["completion", shell]) == 0
        scripts[shell] = capsys.readouterr().out
    typed = {
        ("mo",): "models",
        ("models", "pu"): "pull",
        ("models", "make", "--li"): "--like",
        ("serve", "--quantization", "int"): "int8 int4",
        ("generate", "--max-t"): "--max-tokens --max-total-tokens",
    }
    for words, expected in typed.items():
        line = f"COMP_WORDS=(forebay {' '.join(words)}); COMP_CWORD={len(words)}; _forebay; echo ${{COMPREPLY[@]}}"
        done = subprocess.run(["bash", "-c", f"{scripts['bash']}\n{line}"], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == expected
    assert "__fish_seen_subcommand_from serve' -l dtype -x -a 'bfloat16 float32'" in scripts["fish"]


def test_help_searches_names_aliases_and_texts() -> None:
    assert "--context-length" in full_help("max-model-len")
    assert "--chunked-prefill-size" in full_help("prompt tokens")
    assert "--port" not in full_help("max-model-len")
    assert "no option" in full_help("zebra")


def test_show_prints_the_equations_of_a_type_or_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "show", "falcon_h1"]) == 0
    assert "x += attention(norm(x)) + mamba2(norm(x))" in capsys.readouterr().out


def test_inspect_prints_the_shape_and_the_memory(capsys: pytest.CaptureFixture[str], embedded_model: Path) -> None:
    assert main(["models", "inspect"]) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("llama", "134.5 M", "Q4_1", "22.5 KiB a token", "180.0 MiB for 8,192"))
    assert [word for word in ("bfloat16", "float32", "int8", "uint8") if f"memory, {word}" in text] == [
        "bfloat16",
        "float32",
    ]


@pytest.mark.parametrize(
    ("like", "shown"),
    [
        ("llama", "1 KV heads of 32"),
        ("glm5_next_text", "a latent of 64 for all"),
        ("deepseek_v3", "a latent of 64 and 16 rotated entries for all"),
    ],
)
def test_inspect_of_latent_attention_shows_the_latent(like: str, shown: str) -> None:
    assert kv_heads(config_of(small_config(like, hidden_size=64, num_layers=2, vocab_size=256))) == shown


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stdin", "words"), [(Terminal(), "standard input (echo"), (io.TextIOWrapper(io.BytesIO(b"\n")), "is empty")]
)
def test_generate_without_a_prompt_says_where_it_could_come_from(
    stdin: io.TextIOBase, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", stdin)
    assert main(["generate"]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_doctor_names_the_library_of_the_best_variant_of_this_cpu(variant: Variant, tmp_path: Path) -> None:
    for each in VARIANTS:
        (tmp_path / f"{each.name}-0123-4567.so").touch()
    found = kernels_finding(tmp_path, Cpu(flags=variant.needs), tmp_path / "none")
    assert (found.verdict, found.what) == (Verdict.OK, str(tmp_path / f"{variant.name}-0123-4567.so"))
    assert "came with the package" in kernels_finding(tmp_path / "none", Cpu(flags=variant.needs), tmp_path).what


def test_doctor_says_what_the_cpu_lacks_and_what_that_costs() -> None:
    for family in (X86_VARIANTS, ARM_VARIANTS):
        for at, variant in enumerate(family):
            what = cpu_finding(Cpu(flags=variant.needs)).what
            assert f"runs {variant.name}" in what
            assert [each.name for each in family[:at] if each.cost not in what] == []
        assert "without" not in cpu_finding(Cpu(flags=family[0].needs)).what
    vnni = cpu_finding(Cpu(flags=next(each.needs for each in VARIANTS if each.name == "avx512vnni"))).what
    assert "without avx512_bf16: arithmetic is in float32" in vnni
    assert "without amx_bf16, amx_tile: prompts" in vnni
    assert cpu_finding(Cpu(flags=frozenset())).verdict is Verdict.NOTE


def test_doctor_says_what_to_do_about_libraries_that_pile_up_or_are_missing(tmp_path: Path) -> None:
    cpu = Cpu(flags=X86_VARIANTS[-1].needs)
    assert "forebay.ops.build" in kernels_finding(tmp_path, cpu, tmp_path / "none").fix
    for number in range(9):
        (tmp_path / f"avx2-{number}.so").touch()
    found = kernels_finding(tmp_path, cpu, tmp_path / "none")
    assert found.verdict is Verdict.NOTE
    assert "8 others" in found.what
    assert f"rm {tmp_path}/*.so" in found.fix
    assert "torch" in kernels_finding(tmp_path, Cpu(flags=frozenset()), tmp_path / "none").what


def test_doctor_names_a_port_that_is_taken(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, taken_port: int
) -> None:
    monkeypatch.setattr(doctor_machine, "read_gb_s", lambda threads: 30.0)
    assert main(["doctor", "--port", str(taken_port)]) in (0, 1)
    text = capsys.readouterr().out
    assert str(taken_port) in text
    assert "cannot be used" in text
    assert any(line.endswith(f"({sys.executable})") for line in text.splitlines())
    assert "fix: stop what listens there (ss -ltnp), or forebay serve --port N" in text


def test_defaults_of_zero_are_shown_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["models", "make", "--help"])
    assert "of the weights [0]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("variable", "words"),
    [("FOREBAY_PROT", "did you mean FOREBAY_PORT?"), ("FOREBAY_DP_SIZE", "one machine")],
)
def test_an_unknown_variable_is_a_note_for_whoever_runs_the_command(
    variable: str, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, embedded_model: Path
) -> None:
    monkeypatch.setenv(variable, "1")
    parser = Parser("serve", "", "")
    parser.engine_flags(server=True, model_is_positional=True)
    parser.parse([]).resolve()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"forebay: note: the environment variable {variable} is not known")
    assert words in line


def test_a_path_is_not_broken_over_lines_for_a_script(capsys: pytest.CaptureFixture[str], embedded_model: Path) -> None:
    assert main(["models", "ls"]) == 0
    assert str(embedded_model) in capsys.readouterr().out


def interrupted(module: str) -> subprocess.CompletedProcess[str]:
    """Run a command in which Ctrl-C lands at the import of a module, and of each one behind it."""
    code = (
        "import importlib.abc, os, signal, sys\n"
        "class Finder(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from forebay.cli.main import main\n"
        "sys.exit(main(['models', 'list']))\n"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "module", ["forebay.cli.commands", "forebay.base.errors", "forebay.cli.models", "forebay.cli.arguments"]
)
def test_main_ctrl_c_during_imports_exits_with_130_and_says_nothing(module: str) -> None:
    done = interrupted(module)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_main_imports_nothing_of_forebay_before_it_handles_ctrl_c() -> None:
    code = "import forebay.cli.main, sys; print(*sorted(name for name in sys.modules if name.startswith('forebay')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["forebay", "forebay.cli", "forebay.cli.main"]


def test_inspect_of_a_text_encoder_names_its_layers_and_no_kv(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(shared_encoder("bert").path, tmp_path / "bert")
    write_tokenizer(folder)
    assert main(["models", "inspect", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "3 of width 48, inner 80" in shown
    assert "KV 0 B" not in shown
