"""Rules of text encoders."""

from tests.mutants.mutant import Mutant

_MODELS = "models/test_text_encoders.py::"
_HIDDEN = _MODELS + "test_text_encoder_step_of_texts_gives_each_its_hidden_states_of_transformers"
_SAME = _MODELS + "test_c28_text_encoder_other_texts_in_the_step_change_no_bit"
_VECTORS = "engine/test_text_encoders.py::"
_PLAN = "scheduler/test_text_encoders.py::"

TEXT_ENCODERS = (
    Mutant(
        "C28 C29 a token attends to no token of the next text",
        "ops/reference/attention.py",
        "seq_lens=q_start[1:] - q_start[:-1],",
        "seq_lens=torch.minimum(q_start[1:] + 1, q_start[-1:]) - q_start[:-1],",
        _SAME,
    ),
    Mutant(
        "C28 a text's tokens are those of its own segment",
        "ops/reference/attention.py",
        "        rows=q_start[:-1],\n",
        "        rows=torch.zeros_like(q_start[:-1]),\n",
        _HIDDEN,
    ),
    Mutant(
        "C28 a mean is of the tokens of one text",
        "runtime/sampling/pooling.py",
        "hidden[first : first + int(plan.q_lens[place])]",
        "hidden[first : first + int(plan.q_lens.max())]",
        _VECTORS + "test_c28_embed_text_encoder_steps_and_neighbours_change_no_bit",
    ),
    Mutant(
        "C28 C29 the first token is that of the text itself",
        "runtime/sampling/pooling.py",
        "row, first = int(plan.rows[place]), int(firsts[place])",
        "row, first = int(plan.rows[place]), int(firsts[0])",
        _VECTORS + "test_c28_embed_text_encoder_steps_and_neighbours_change_no_bit",
    ),
    Mutant(
        "C28 a token has the embedding of its kind",
        "layers/text_embeddings.py",
        "self._types(input_ids // self._vocab_size)",
        "self._types(input_ids // self._vocab_size * 0)",
        _HIDDEN,
    ),
    Mutant(
        "C28 the first token has the first position behind the padding token's",
        "layers/text_embeddings.py",
        "change=lambda table: table[spec.offset :]",
        "change=lambda table: table[: len(table) - spec.offset]",
        _HIDDEN,
    ),
    Mutant(
        "C28 of one layer with both the gate is behind",
        "layers/encoder_mlp.py",
        "(range(inner, 2 * inner), range(inner)) if joined and",
        "(range(2 * inner),) if joined and",
        _HIDDEN,
    ),
    Mutant(
        "C28 C29 near tokens end with the text",
        "layers/segments.py",
        "ahead = (ends - 1 - each).clamp(max=reach).int()",
        "ahead = (q_start[-1] - 1 - each).clamp(max=reach).int()",
        _SAME,
    ),
    Mutant(
        "C28 a vector passes through the dense layers behind the pooling",
        "engine/client/embedding.py",
        "head=bool(self.embedding.dense)",
        "head=False",
        _VECTORS + "test_embed_text_encoder_vectors_pass_through_the_dense_layers",
    ),
    Mutant(
        "C28 dense layers are applied in their order",
        "models/text_encoder.py",
        "tuple(map(_dense_spec, config.dense))",
        "tuple(map(_dense_spec, config.dense[:1]))",
        _VECTORS + "test_embed_text_encoder_vectors_pass_through_the_dense_layers",
    ),
    Mutant(
        "C28 the weights of dense layers belong to the identity of a checkpoint",
        "formats/identity.py",
        ', "*/*.safetensors")',
        ")",
        "transfer/test_layout.py::test_weights_are_told_apart_by_any_of_their_samples",
    ),
    Mutant(
        "C28 distances up to half of the span have a row each",
        "layers/disentangled_attention.py",
        "torch.where(distance.abs() <= middle, distance,",
        "torch.where(distance.abs() < middle // 2, distance,",
        _HIDDEN,
    ),
    Mutant(
        "C28 a key's term is that of its own distance",
        "layers/disentangled_attention.py",
        ".gather(2, apart.transpose(1, 2)).transpose(1, 2)",
        ".gather(2, apart).transpose(1, 2)",
        _HIDDEN,
    ),
    Mutant(
        "C28 distances in a step are those of its longest text",
        "layers/disentangled_attention.py",
        "first, last = int(buckets[0]), int(buckets[-1])",
        "first, last = int(buckets[0]) + 1, int(buckets[-1])",
        _HIDDEN,
    ),
    Mutant(
        "C28 a layer's norm behind a part comes before the sum",
        "layers/encoder_layer.py",
        "self._ops.elementwise.add_(inner(part(norm(x), texts)), x)",
        "inner(self._ops.elementwise.add_(part(norm(x), texts), x))",
        _HIDDEN,
    ),
    Mutant(
        "C28 a token sees as many near tokens in front as behind",
        "layers/segments.py",
        "near, window = texts.near, spec.reach + 1",
        "near, window = texts.near, spec.reach",
        _HIDDEN,
    ),
    Mutant(
        "C28 the bias of a score is that of its distance",
        "layers/score_biases.py",
        "own = bias[:, middle + places - places.unsqueeze(1)]",
        "own = bias[:, middle + places - places.unsqueeze(1) - 1]",
        _HIDDEN,
    ),
    Mutant(
        "C28 a text is computed whole, in one step",
        "scheduler/admission.py",
        "if self._uncut * len(req.tokens) > self._num_remaining:",
        "if self._uncut > self._num_remaining:",
        _PLAN + "test_plan_text_encoder_computes_each_text_whole_in_one_step",
    ),
    Mutant(
        "C32 a text that waits for a whole step is next",
        "scheduler/admission.py",
        "self._starts = False  # the next step, which",
        "pass  # the next step, which",
        _PLAN + "test_c32_text_encoder_long_text_is_not_overtaken_for_ever_by_short_ones",
    ),
    Mutant(
        "C27 a text encoder is asked for vectors alone",
        "scheduler/limits.py",
        "if config.text_encoder and pooling is None:",
        "if config.text_encoder and pooling is None and False:",
        _PLAN + "test_add_text_encoder_refuses_generation_and_texts_longer_than_a_step",
    ),
    Mutant(
        "C28 the second text of a pair has its own kind",
        "engine/client/embedding.py",
        "token + self.encoder.vocab_size * min(kind, last)",
        "token + 0 * min(kind, last)",
        _VECTORS + "test_score_text_encoder_pairs_have_the_scores_of_transformers",
    ),
    Mutant(
        "C27 a model without a head is asked for no labels",
        "scheduler/limits.py",
        "if pooling and pooling.head and not config.head_outputs:",
        "if pooling and pooling.head and not config.text_encoder:",
        _PLAN + "test_add_text_encoder_refuses_generation_and_texts_longer_than_a_step",
    ),
    Mutant(
        "C27 a text encoder refuses a chat before it is rendered",
        "server/api/core/serving.py",
        "    if server.model.texts.encoder is not None:\n",
        "    if server.model.texts.encoder is not None and server.model.texts.encoder.labels:\n",
        "server/test_text_encoders.py::test_text_encoder_refuses_by_name_what_it_cannot_do",
    ),
    Mutant(
        "C19 C28 a text encoder has no prefix cache",
        "config/text_encoders.py",
        '**({"radix_cache": False} if model.is_text_encoder else {})',
        "**{}",
        _VECTORS + "test_text_encoder_with_a_prefix_cache_asked_for_computes_all_tokens",
    ),
)
