"""Rules of vision encoders in GGUF files; see `tests.mutants`."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_TESTS: Final = "models/test_mmproj.py"
_SAME: Final = f"{_TESTS}::test_encoder_of_a_gguf_file_equals_that_of_safetensors"
_FILES: Final = "formats/test_mmproj_files.py::test_encoder_is_chosen_by_model_and_then_by_type"

MMPROJ: Final[tuple[Mutant, ...]] = (
    Mutant(
        "C31 queries and keys of Pixtral are stored with rotary pairs as neighbours",
        "families/parts/mmproj/pixtral.py",
        "        rotated=True,\n",
        "",
        f"{_SAME}[mistral3]",
    ),
    Mutant(
        "C31 patches are stored with channels before rows and columns",
        "families/parts/mmproj/arrange.py",
        "read_tensor(stored).transpose(0, 2, 3, 1)",
        "read_tensor(stored)",
        f"{_SAME}[lfm2_vl]",
    ),
    Mutant(
        "C31 patches of Gemma 4 12B are stored with channels before rows and columns",
        "families/parts/mmproj/arrange.py",
        "read_tensor(tensor).reshape(channels).transpose(0, 2, 3, 1))",
        "read_tensor(tensor).reshape(channels))",
        f"{_SAME}[gemma4_unified]",
    ),
    Mutant(
        "C31 the norm before the patches of Gemma 4 12B is stored by channel, as they are",
        "families/parts/mmproj/gemma4.py",
        '("patch_dense.weight", "patch_ln1.weight", "patch_ln1.bias"))',
        '("patch_dense.weight", "patch_ln1.weight"))',
        f"{_SAME}[gemma4_unified]",
    ),
    Mutant(
        "C31 positions of Gemma 4 12B are stored with all columns before all rows",
        "families/parts/mmproj/arrange.py",
        "lambda: read_tensor(tensor).swapaxes(0, 1))",
        "lambda: read_tensor(tensor))",
        f"{_SAME}[gemma4_unified]",
    ),
    Mutant(
        "C31 a bound of a layer of Gemma 4 has no dimensions, which files cannot have",
        "families/parts/mmproj/gemma4.py",
        "tensor = number(tensor, header) if kind in _BOUNDS else tensor",
        "tensor = tensor if kind in _BOUNDS else tensor",
        f"{_SAME}[gemma4]",
    ),
    Mutant(
        "C31 a token of InternVL is made of as many patches in a row as the file says",
        "families/parts/mmproj/internvl.py",
        '1 / header.own.size("projector.scale_factor", default=2)',
        "0.5",
        f"{_TESTS}::test_encoder_of_internvl_has_the_factor_of_its_file",
    ),
    Mutant(
        "C31 an image of InternVL is cut into at most as many tiles as the file says",
        "families/parts/mmproj/internvl.py",
        '"preproc_max_tiles": "max_patches"',
        '"preproc_max_tiles": "most_patches"',
        f"{_TESTS}::test_tiles_of_internvl_are_at_most_those_of_the_file",
    ),
    Mutant(
        "C31 weights of two images in time are stacked behind the channels",
        "families/parts/mmproj/arrange.py",
        "for source in sources], axis=2))",
        "for source in sources], axis=1))",
        f"{_SAME}[qwen2_vl]",
    ),
    Mutant(
        "C31 of q, k and v in one matrix the values come last",
        "families/parts/mmproj/qwen.py",
        '_FUSED: Final = ("q", "k", "v")',
        '_FUSED: Final = ("q", "v", "k")',
        f"{_SAME}[qwen2_vl]",
    ),
    Mutant(
        "C31 a feature's merger is stored under the number of its layer",
        "families/parts/mmproj/qwen.py",
        'f"{begin}{layer}.": f"{begin}{number}."',
        'f"{begin}{layer}.": f"{begin}{layer + 1}."',
        f"{_SAME}[qwen3_vl]",
    ),
    Mutant(
        "C31 a period of n layers ends with the one that sees the whole image",
        "families/parts/mmproj/qwen.py",
        "if (layer + 1) % period == 0]",
        "if layer % period == 0]",
        f"{_SAME}[qwen2_5_vl]",
    ),
    Mutant(
        "C31 the norm of Gemma 3's projector is stored with 1 added",
        "families/parts/mmproj/siglip.py",
        "less_one(tensor) if name == _NORM else tensor",
        "tensor",
        f"{_SAME}[gemma3]",
    ),
    Mutant(
        "C31 old files have each other's names for the matrices of an MLP",
        "families/parts/mmproj/projector.py",
        "down.shape[1] == width != down.shape[0]",
        "down.shape[0] == down.shape[1]",
        f"{_TESTS}::test_encoder_with_the_names_of_old_files_equals_that_of_new_ones",
    ),
    Mutant(
        "C31 an encoder whose tokens have another width is another model's",
        "families/parts/mmproj/reader.py",
        "    if found != wanted:\n",
        "    if found > wanted:\n",
        f"{_TESTS}::test_encoder_of_another_model_is_refused_with_both_widths",
    ),
    Mutant(
        "C31 an encoder's file that names another model is not taken",
        "formats/mmproj_files.py",
        "    if not model.startswith(named):\n        return None\n",
        "",
        _FILES,
    ),
    Mutant(
        "C31 an encoder's file is taken from the model's folder before those around it",
        "formats/mmproj_files.py",
        "for folder in at.parents:",
        "for folder in reversed(at.parents):",
        _FILES,
    ),
    Mutant(
        "C31 of encoders' files the one that names most of the model is taken",
        "formats/mmproj_files.py",
        "return -len(named), ",
        "return len(named), ",
        _FILES,
    ),
    Mutant(
        "C31 of encoders' files that fit equally none is taken",
        "formats/mmproj_files.py",
        "    if len(found) > 1:\n",
        "    if len(found) > 2:\n",
        "formats/test_mmproj_files.py::test_encoders_that_fit_equally_are_refused_with_their_names",
    ),
    Mutant(
        "C31 an image of a template for texts alone is between the texts of its message",
        "text/tokenizer.py",
        "        return message\n    said",
        "        return message\n    return message\n    said",
        "server/images/test_text_templates.py::test_expansion_template_for_texts_alone_writes_the_image_between_them",
    ),
)
