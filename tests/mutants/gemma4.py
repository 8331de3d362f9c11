"""Rules of images of Gemma 4: its encoder, its image processor, and what its language model is given."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_ENCODER: Final = "models/test_encoder.py"
_ORACLE: Final = f"{_ENCODER}::test_encodings_equal_those_of_transformers[torch-gemma4]"
_LARGE: Final = f"{_ENCODER}::test_encodings_equal_those_of_transformers[torch-gemma4-experts]"
_FIELDS: Final = "families/test_vision_gemma4.py::"
_SERVER: Final = "server/images/test_gemma4.py::"
_LAYERS: Final = "layers/gemma4_encoder.py"
_CONFIG: Final = "families/config/vision/gemma4.py"
_TILING: Final = "server/images/tilings/gemma4.py"

GEMMA4: Final = (
    Mutant(
        "C28 inputs of layers are those of padding where an image is",
        _CONFIG,
        "        return self.padding\n",
        "        return self.placeholder\n",
        "integration/test_pictures.py::test_tokens_and_log_probabilities_equal_those_of_transformers[gemma4]",
    ),
    Mutant(
        "C18 a model is given its input id where ids stand for pictures",
        "memory/pictures.py",
        "_with(self, ids, self.config.input_id)",
        "_with(self, ids, self.config.placeholder)",
        "memory/test_pictures.py::test_model_is_given_its_input_id_where_ids_stand_for_pictures",
    ),
    Mutant(
        "C28 tokens of an image see each other in both directions only where the file says so",
        _CONFIG,
        '"bidirectional": given is not None,',
        '"bidirectional": True,',
        _FIELDS + "test_published_encoders_are_read",
    ),
    Mutant(
        "C31 one half of a head turns by the row, and the other by the column",
        _LAYERS,
        "return row, column, row_second, column_second",
        "return column, row, column_second, row_second",
        _ORACLE,
    ),
    Mutant(
        "C31 norms of queries and keys are in the order of their heads' dimensions",
        _LAYERS,
        "dim, change=partial(in_order, rows=order))",
        "dim)",
        _ORACLE,
    ),
    Mutant(
        "C31 a patch has the positions of its column and of its row",
        _LAYERS,
        "self._positions[0, :columns], self._positions[1, :rows]",
        "self._positions[1, :columns], self._positions[0, :rows]",
        _ORACLE,
    ),
    Mutant(
        "C31 inputs of linear layers are held within bounds",
        _LAYERS,
        "self._linear.of(x.clamp(least, most))",
        "self._linear.of(x)",
        _ORACLE,
    ),
    Mutant(
        "C31 outputs of linear layers are held within bounds",
        _LAYERS,
        ".clamp_(least_out, most_out)",
        "",
        _ORACLE,
    ),
    Mutant(
        "C31 scores of normed queries and keys are not scaled",
        _LAYERS,
        "tile, scale=1.0)",
        "tile, scale=spec.head_dim**-0.5)",
        _ORACLE,
    ),
    Mutant(
        "C31 averages are multiplied by the root of the hidden size",
        _LAYERS,
        "means.float() * self._root",
        "means.float()",
        _LARGE,
    ),
    Mutant(
        "C31 a mean is subtracted from averages before they are scaled",
        _LAYERS,
        "(tokens - mean.float()) * scale.float()",
        "tokens * scale.float() - mean.float()",
        _LARGE,
    ),
    Mutant(
        "C31 a bound may be infinite, and must be a number",
        "models/loader.py",
        "return _copy(source, target) or not bool(target.isnan().any())",
        "return _copy(source, target) or True",
        f"{_ENCODER}::test_bounds_that_are_no_numbers_are_refused",
    ),
    Mutant(
        "C31 pixels are normed by the encoder itself",
        _CONFIG,
        "each + deviation / 2 for each",
        "each for each",
        _ORACLE,
    ),
    Mutant(
        "C31 pixels have no other mean unless the processor says that it normalizes",
        _CONFIG,
        'processor.flag("do_normalize", default=False)',
        'processor.flag("do_normalize", default=True)',
        _FIELDS + "test_pixels_are_normalized_where_the_processor_says_so",
    ),
    Mutant(
        "C31 parts for audio are not taken for the encoder's",
        "families/config/outer.py",
        "name.startswith(self.parts) and not name.startswith(self.never_served)",
        "name.startswith(self.parts)",
        f"{_ENCODER}::test_parts_for_audio_are_left_out_and_logged_once",
    ),
    Mutant(
        "C28 an image that is narrower than a token has no more tokens than others",
        _TILING,
        "        rows, columns = 1, most\n",
        "        rows = 1\n",
        _SERVER + "test_sizes_are_those_of_transformers",
    ),
    Mutant(
        "C28 an image of Gemma 4 is resized with the processor's filter",
        _TILING,
        "image.resize((width, height), self.resample)",
        "image.resize((width, height))",
        _SERVER + "test_image_with_another_filter_equals_that_of_transformers",
    ),
    Mutant(
        "C28 a request for few tokens gets few",
        _TILING,
        "self.max_tokens if splits else min(LOW_TOKENS, self.max_tokens)",
        "self.max_tokens",
        _SERVER + "test_request_for_few_tokens_gets_few",
    ),
    Mutant(
        "C28 tokens of an image stand between its begin and its end",
        _TILING,
        'f"{spell(self.begin)}{image}{spell(self.end)}"',
        "image",
        _SERVER + "test_prompt_equals_that_of_transformers",
    ),
    Mutant(
        "C33 images have no more patches on an edge than there are positions",
        _TILING,
        "    if vision.max_edge < vision.max_tokens * vision.token_edge:\n",
        "    if False:\n",
        _SERVER + "test_parameters_that_do_not_fit_are_refused",
    ),
)
