"""Rules of models with a language model inside, of Ministral 3 and of Mellum; see `tests.mutants`."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_TEXT: Final = "families/test_outer.py"
_PUBLISHED: Final = "models/test_outer.py::test_published_names_give_the_logits_of_transformers"
_GGUF: Final = "models/test_gguf_outer.py::test_converted_model_gives_the_logits_of_the_original"
_SCALES: Final = "layers/test_rotary.py::test_query_scales_equal_those_of_transformers"

OUTER: Final[tuple[Mutant, ...]] = (
    Mutant(
        "C33 names of two kinds in one checkpoint are refused",
        "families/config/outer.py",
        "        if len(begins) > 1:\n",
        "        if len(begins) > 2:\n",
        "models/test_outer.py::test_names_of_two_kinds_in_one_checkpoint_are_refused",
    ),
    Mutant(
        "C33 a language model that is nested twice is refused",
        "families/config/outer.py",
        'if isinstance(inner.get("text_config"), dict) or ',
        "if ",
        f"{_TEXT}::test_text_config_that_is_nested_twice_is_refused",
    ),
    Mutant(
        "C33 a type whose text is of one family refuses others",
        "families/config/outer.py",
        "outer.types.get(named) if outer.types else",
        "outer.types.get(named, named) if outer.types else",
        f"{_TEXT}::test_text_config_of_another_family_is_refused",
    ),
    Mutant(
        "C31 the language model's tensors begin with one of the names of the table",
        "families/config/outer.py",
        '_LLAVA: Final = ("language_model.model.", "model.language_model.")',
        '_LLAVA: Final = ("language_model.", "model.language_model.")',
        _PUBLISHED,
    ),
    Mutant(
        "C31 a head may stand below the language model",
        "families/config/outer.py",
        'names[name] = name.removeprefix("language_model.") if',
        "names[name] = name if",
        _PUBLISHED,
    ),
    Mutant(
        "C31 parts that are not served are left in the files",
        "families/config/outer.py",
        "            if name.startswith(self.parts):\n",
        "            if name.startswith(self.parts[:1]):\n",
        _PUBLISHED,
    ),
    Mutant(
        "C31 embeddings are tied where either file says so",
        "families/config/outer.py",
        "next((value for value in given if value is not False), False)",
        "given[0]",
        f"{_TEXT}::test_tied_embeddings_are_said_by_either_file_or_by_the_table",
    ),
    Mutant(
        "C31 sections of three positions have no effect on text",
        "families/config/outer.py",
        '"rope_type": "default" if kind == "mrope" else kind',
        '"rope_type": kind',
        f"{_TEXT}::test_sections_of_the_rope_have_no_effect",
    ),
    Mutant(
        "C31 a rope with sections stays scaled",
        "families/config/outer.py",
        '"rope_type": "default" if kind == "mrope" else kind',
        '"rope_type": "default"',
        f"{_TEXT}::test_scaled_rope_with_sections_stays_scaled",
    ),
    Mutant(
        "C31 experts of Qwen 3 VL are weighed by shares that are normalized, whatever the file says",
        "families/config/outer.py",
        '"norm_topk_prob": True}',
        '"norm_topk_prob": False}',
        _PUBLISHED,
    ),
    Mutant(
        "C31 stacks of experts with inputs before outputs are turned",
        "families/checkpoint.py",
        "config.outer.turned_stacks and shape[1:] != _expected(kind, config)",
        "config.outer.turned_stacks and shape[1:] == _expected(kind, config)",
        _PUBLISHED,
    ),
    Mutant(
        "C31 in a turned stack an expert's gate is before its up",
        "families/checkpoint.py",
        "            of_part = slice(i * size, (i + 1) * size)\n",
        "            of_part = slice((len(parts) - 1 - i) * size, (len(parts) - i) * size)\n",
        _PUBLISHED,
    ),
    Mutant(
        "C31 modules outside the codes are named as in the files",
        "formats/layer_packing.py",
        "for name in (module, *theirs))",
        "for name in (module,))",
        f"{_TEXT}::test_modules_outside_the_codes_are_named_as_in_the_files",
    ),
    Mutant(
        "C31 queries are scaled by the logarithm of whole lengths",
        "layers/rotary.py",
        "torch.arange(num_positions) // spec.length",
        "torch.arange(num_positions) / spec.length",
        _SCALES,
    ),
    Mutant(
        "C31 queries are scaled behind the rotation, in models that do so",
        "layers/paged_attention.py",
        "        if self._query_scales is not None:\n",
        "        if self._query_scales is None and q is None:\n",
        _GGUF,
    ),
    Mutant(
        "C31 the amplitude of a Ministral's rope is of two factors",
        "families/ministral3/gguf.py",
        'scaling |= {"mscale": 1.0, "mscale_all_dim": header.own[_LOG_MULTIPLIER]}',
        'scaling |= {"mscale": 1.0}',
        _GGUF,
    ),
    Mutant(
        "C31 rotary pairs of Ministral 3 are neighbours in GGUF files",
        "families/ministral3/gguf.py",
        "        interleaved_rope=True,\n",
        "        interleaved_rope=False,\n",
        _GGUF,
    ),
    Mutant(
        "C31 layers of Mellum with a window have a rope of their own",
        "models/families/mellum.py",
        "*config.ropes[config.layer_types[layer]]",
        '*config.ropes["full_attention"]',
        _GGUF,
    ),
    Mutant(
        "C31 of Mellum only the layers that are listed have a window",
        "families/mellum/gguf.py",
        "        return [bool(window) for window in pattern.tolist()]\n",
        "        return [True for window in pattern.tolist()]\n",
        _GGUF,
    ),
    Mutant(
        "C31 the layer that drafts for Mellum has a window",
        "models/families/mellum.py",
        "(*config.layer_types, attention)",
        '(*config.layer_types, "full_attention")',
        "models/test_draft_head.py::test_a_draft_head_guesses_what_its_layers_do_in_transformers",
    ),
)
