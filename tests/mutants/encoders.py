"""Rules of encoders of pictures, their ops and their weights; see `tests.mutants`."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_TESTS: Final = "models/test_encoder.py"
_ORACLE: Final = f"{_TESTS}::test_encodings_equal_those_of_transformers"
_FLEX: Final = f"{_ORACLE}[torch-lfm2_vl]"
_PIXTRAL: Final = f"{_ORACLE}[torch-mistral3]"
_VISION: Final = "families/test_vision.py"
_WITHIN: Final = "ops/test_attention.py::test_attention_within_segments_equals_that_of_each_alone"

ENCODERS: Final[tuple[Mutant, ...]] = (
    Mutant(
        "C31 a square of patches becomes one token row by row",
        "layers/encoder.py",
        "squares.transpose(1, 2).flatten()",
        "squares.permute(0, 2, 3, 1).flatten()",
        _ORACLE,
    ),
    Mutant(
        "C31 patches of a square come from neighbouring rows of a tile",
        "layers/encoder.py",
        "squares.transpose(1, 2).flatten()",
        "squares.flatten()",
        _ORACLE,
    ),
    Mutant(
        "C31 linear layers of an encoder have biases",
        "layers/encoder.py",
        'mlp.linear({"fc2": width}, inner, bias=True)',
        'mlp.linear({"fc2": width}, inner, bias=False)',
        _ORACLE,
    ),
    Mutant(
        "C31 patches have a bias",
        "layers/encoder.py",
        'kernel.view(width, -1), parts.values("patch_embedding.bias", width))',
        'kernel.view(width, -1), parts.values("patch_embedding.bias", width) * 0)',
        _ORACLE,
    ),
    Mutant(
        "C31 an encoder's feed-forward layers have a GELU",
        "layers/encoder.py",
        "ops.gelu(self._up.of(norm_mlp",
        "ops.relu2(self._up.of(norm_mlp",
        _ORACLE,
    ),
    Mutant(
        "C31 GELU without a gate is the one by tanh",
        "ops/elementwise.py",
        'F.gelu(x.float().contiguous(), approximate="none" if exact else "tanh")',
        "F.gelu(x.float().contiguous())",
        "ops/test_activations.py::test_activations_equal_the_reference",
    ),
    Mutant(
        "C31 a patch takes the position of the interval in which its fraction falls",
        "layers/encoder.py",
        "torch.bucketize(fractions, boundaries, right=True)",
        "torch.bucketize(fractions, boundaries)",
        f"{_TESTS}::test_position_ids_are_those_of_transformers",
    ),
    Mutant(
        "C31 pixels are moved by their mean in units of their deviation",
        "layers/encoder.py",
        "[-each / deviation for",
        "[-each for",
        _ORACLE,
    ),
    Mutant(
        "C31 the channels of a patch follow each other",
        "ops/pictures.py",
        ".permute(0, 2, 4, 1, 3)",
        ".permute(0, 2, 1, 3, 4)",
        "ops/test_pictures.py::test_linear_layer_over_patch_rows_equals_a_convolution",
    ),
    Mutant(
        "C31 pixels of a patch follow each other by channel, whatever the file has",
        "layers/encoder.py",
        "by_row.view(width, size * size, CHANNELS).transpose(1, 2).reshape(width, -1)",
        "by_row.view(width, -1)",
        _FLEX,
    ),
    Mutant(
        "C31 positions are interpolated to the rows and columns of a tile",
        "layers/encoder.py",
        "positions = self._positions_of((height // self._size, width // self._size))",
        "positions = self._positions_of((width // self._size, height // self._size))",
        _FLEX,
    ),
    Mutant(
        "C31 a projector has the GELU by the error function",
        "layers/encoder.py",
        "self._ops.gelu(self._up.of(x), exact=True)",
        "self._ops.gelu(self._up.of(x))",
        _FLEX,
    ),
    Mutant(
        "C31 the even frequencies turn by the row, and the odd ones by the column",
        "layers/pixtral.py",
        "by_row, by_column], dim=1)",
        "by_column, by_row], dim=1)",
        _PIXTRAL,
    ),
    Mutant(
        "C31 columns of a patch begin anew in each row",
        "layers/pixtral.py",
        ".repeat(grid[0], 1)",
        ".repeat_interleave(grid[0], 0)",
        _PIXTRAL,
    ),
    Mutant(
        "C31 patches of a token follow each other, whatever the file of the merger has",
        "layers/pixtral.py",
        "by_channel.view(width, width, size).transpose(1, 2).reshape(width, -1)",
        "by_channel.view(width, -1)",
        _PIXTRAL,
    ),
    Mutant(
        "C31 a row of an image's tokens ends with its token, and the last row with another",
        "server/images/tilings/whole.py",
        "(line + self.line_end) * (height // self.token_edge - 1) + line + self.end",
        "(line + self.line_end) * (height // self.token_edge) + self.end",
        "server/images/test_whole.py::test_text_of_an_image_equals_that_of_transformers",
    ),
    Mutant(
        "C31 edges of an image are rounded up to whole tokens",
        "server/images/tilings/whole.py",
        "return math.ceil(edge / self.token_edge) * self.token_edge",
        "return round(edge / self.token_edge) * self.token_edge",
        "server/images/test_whole.py::test_pixels_of_any_size_equal_those_of_transformers",
    ),
    Mutant(
        "C31 names of published files are those of transformers",
        "families/vision/base.py",
        '    ("model.vision_tower.vision_model.", "model.vision_tower."),\n',
        "",
        f"{_TESTS}::test_files_as_published_give_the_same_bits[lfm2_vl]",
    ),
    Mutant(
        "C31 of two grids that are equally close an image takes the one that it fills",
        "server/images/tilings/flex.py",
        "distance == best_distance and is_filled",
        "distance == best_distance and not is_filled",
        "server/images/test_flex.py::test_any_size_has_the_grid_and_the_whole_of_transformers",
    ),
    Mutant(
        "C33 an image that is too long for the encoder is refused by the server",
        "server/images/tilings/flex.py",
        "if (count := self.num_tokens((height, width))) > most:",
        "if (count := self.num_tokens((height, width))) > 16 * most:",
        "server/images/test_flex.py::test_image_that_is_too_long_for_its_width_is_refused_with_the_numbers",
    ),
    Mutant(
        "C31 patches attend to each other both ways",
        "ops/attention.py",
        "        causal=False,\n",
        "        causal=True,\n",
        _ORACLE,
    ),
    Mutant(
        "C31 within segments the reference sees all keys",
        "ops/attention.py",
        "query_positions.fill_(length - 1)",
        "query_positions.fill_(length // 2)",
        _WITHIN,
    ),
    Mutant(
        "C31 a slice of an encoder leaves the state that it begins with",
        "layers/encoder.py",
        "x = ops.add_(self._out.of(attended.flatten(1)), x)",
        "x = ops.add_(x, self._out.of(attended.flatten(1)))",
        f"{_TESTS}::test_slices_give_the_bits_of_the_whole_and_leave_their_arguments",
    ),
    Mutant(
        "C5 row 0 of encodings is never read",
        "ops/pictures.py",
        "x.copy_(torch.where((rows > 0).unsqueeze(1), table.index_select(0, rows), x))",
        "x.copy_(table.index_select(0, rows))",
        "ops/test_pictures.py::test_replace_rows_takes_what_is_named_and_leaves_the_rest",
    ),
    Mutant(
        "C28 features are added behind the layers that they are for",
        "models/decoder.py",
        "layer < len(features):\n                x = ops.add_rows_(x, features[layer]",
        "0 < layer <= len(features):\n                x = ops.add_rows_(x, features[layer - 1]",
        "integration/test_pictures.py::test_tokens_and_log_probabilities_equal_those_of_transformers",
    ),
    Mutant(
        "C5 row 0 of encodings is never added",
        "ops/pictures.py",
        "x.copy_(torch.where((rows > 0).unsqueeze(1), added, x))",
        "x.copy_(added)",
        "ops/test_pictures.py::test_rows_of_a_part_of_wider_rows_are_taken_and_added",
    ),
    Mutant(
        "C33 an encoder's weights are checked before one is read",
        "models/encoder.py",
        "    check_names(beside, params)\n",
        "",
        f"{_TESTS}::test_wrong_weights_are_refused_before_they_are_read",
    ),
    Mutant(
        "C33 patches of a tile divide into the squares that become tokens",
        "families/vision/siglip.py",
        "if not config.side or config.side % config.merge:",
        "if not config.side:",
        f"{_VISION}::test_encoders_that_are_not_served_are_refused_with_the_numbers",
    ),
    Mutant(
        "C33 the placeholder of images is a token of the vocabulary",
        "families/vision/siglip.py",
        "least=0, most=vocab_size - 1)",
        "least=0)",
        f"{_VISION}::test_wrong_values_around_the_encoder_are_refused",
    ),
    Mutant(
        "C33 pixels are divided by no deviation of 0",
        "families/vision/base.py",
        '_channels(processor, "image_std", std, 1e-6)',
        '_channels(processor, "image_std", std, 0.0)',
        f"{_VISION}::test_numbers_of_pixels_are_those_of_the_image_processor",
    ),
    Mutant(
        "C31 an image processor beside others counts before one alone",
        "families/model_config.py",
        '    inner = of_all.get("image_processor", own)\n',
        "    inner = own\n",
        f"{_TESTS}::test_mean_and_deviation_are_those_of_the_image_processor",
    ),
    Mutant(
        "C31 an encoder is never quantized, and the plan knows it",
        "engine/lifecycle/model_shape.py",
        "yield WeightKind(None, 0, 16, is_bfloat16(param))",
        "yield WeightKind(None, param.shape[-1], param.min_bits, is_bfloat16(param))",
        f"{_TESTS}::test_plan_counts_the_bytes_that_the_encoder_takes",
    ),
    Mutant(
        "C31 a quantized copy has the encoder",
        "models/quantized_copy.py",
        "    tensors += [_written(name, tensor, None) for name, tensor in checkpoint.encoder.items()]\n",
        "",
        f"{_TESTS}::test_quantized_copy_has_the_encoder_as_it_was",
    ),
)
