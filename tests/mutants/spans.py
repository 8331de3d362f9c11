"""Rules of attention in both directions within pictures, and of the models that have it."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_SCHEDULER: Final = "scheduler/test_pictures.py::"
_OPS: Final = "ops/test_attention.py::"
_GEMMA3: Final = "server/images/test_gemma3.py::"
_ENCODER: Final = "models/test_encoder.py::test_encodings_equal_those_of_transformers"
_MODELS: Final = "models/test_spans.py::test_logits_with_pictures_equal_those_of_transformers"

SPANS: Final = (
    Mutant(
        "C28 a chunk cuts no span",
        "requests/pictures.py",
        "        if end <= start or not pictures.config.longest_span:\n",
        "        if True:\n",
        _SCHEDULER + "test_chunk_ends_in_front_of_a_run_or_is_widened_to_its_end",
    ),
    Mutant(
        "C18 a hit inside a picture computes the rest of it in one chunk",
        "requests/pictures.py",
        "        return int(firsts[at]) if firsts[at] > start else int(firsts[at] + lens[at])\n",
        "        return int(firsts[at]) if firsts[at] > start else stop\n",
        _SCHEDULER + "test_c18_hit_inside_a_picture_computes_the_rest_of_it_in_one_chunk",
    ),
    Mutant(
        "C27 nobody starts before a picture that waits for room in a step",
        "scheduler/admission.py",
        "        self._starts = False\n        return False\n",
        "        return False\n",
        _SCHEDULER + "test_picture_behind_another_prompt_waits_for_a_step_with_room_and_nobody_starts_before_it",
    ),
    Mutant(
        "C13 spans of a plan lie inside its prompts",
        "runtime/host/bounds.py",
        "    if (starts + lens > end).any():\n",
        "    if False:\n",
        "runtime/test_bounds.py::test_c13_spans_of_a_plan_lie_inside_its_prompts",
    ),
    Mutant(
        "C33 a run that no step can hold is refused",
        "engine/loop/pictures.py",
        "    if limits.longest_span and length > limits.longest_span:\n",
        "    if False:\n",
        "engine/test_picture_checks.py::test_c33_run_that_no_step_can_hold_is_refused_with_both_numbers",
    ),
    Mutant(
        "C28 layers without a window are causal within pictures in Gemma 4",
        "models/families/parts/gemma4.py",
        "bidirectional=config.bidirectional and kind == SLIDING,",
        "bidirectional=config.bidirectional,",
        _MODELS,
    ),
    Mutant(
        "C28 layers that read another's KV see pictures as it does",
        "models/families/parts/gemma4.py",
        "        bidirectional=own.bidirectional,\n",
        "",
        _MODELS,
    ),
    Mutant(
        "C28 all layers of Gemma 3 see the whole of a picture",
        "models/families/gemma3_text.py",
        "        bidirectional=True,\n",
        '        bidirectional=config.layer_types[layer] == "sliding_attention",\n',
        _MODELS,
    ),
    Mutant(
        "C28 a query in a picture sees it to its end",
        "ops/reference/attention.py",
        "query_positions if ahead is None else query_positions + ahead[first:end]",
        "query_positions",
        _OPS + "test_a_query_in_a_picture_sees_it_to_its_end",
    ),
    Mutant(
        "C28 layers share a plan of attention only if they look ahead alike",
        "ops/native/attention.py",
        "        key = (*heads, ahead is not None)\n",
        "        key = heads\n",
        _OPS + "test_layers_with_and_without_attention_within_pictures_have_plans_of_their_own",
    ),
    Mutant(
        "C28 line breaks around an image are encoded with the text beside them",
        "text/tokenizer.py",
        "return text.replace(image.token, image.framed)",
        "return text",
        _GEMMA3 + "test_prompt_equals_that_of_transformers",
    ),
    Mutant(
        "C28 an image of Gemma 3 is resized with the processor's filter",
        "server/images/tilings/gemma3.py",
        "image.resize((edge, edge), self.resample)",
        "image.resize((edge, edge))",
        _GEMMA3 + "test_square_of_any_size_equals_that_of_transformers",
    ),
    Mutant(
        "C28 patches of Gemma 3 have the positions of their numbers",
        "models/encoders/gemma3.py",
        "            by_fraction=False,\n",
        "",
        "models/test_encoder.py::test_positions_of_gemma3_are_those_of_transformers",
    ),
    Mutant(
        "C28 the norm behind averages has weights that differ from 1",
        "layers/encoder.py",
        'parts.tensor("mm_soft_emb_norm.weight", spec.hidden_size, offset=1.0)',
        'parts.tensor("mm_soft_emb_norm.weight", spec.hidden_size)',
        _ENCODER,
    ),
    Mutant(
        "C28 a token of Gemma 3 is the average of a square of patches",
        "layers/encoder.py",
        "self._ops.pictures.mean_rows(self._ops.drafting.gather_rows(x, self._order(grid)), self._count)",
        "self._ops.pictures.mean_rows(x, self._count)",
        _ENCODER,
    ),
)
