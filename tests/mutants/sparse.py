"""Rules of sparse attention: which tokens are selected, and whose selection a layer reads."""

from tests.mutants.mutant import Mutant

_OPS = "ops/test_selection.py::"
_ORACLE = "models/test_oracle.py::test_prefill_gives_the_logits_of_transformers"

_POOLED = f"{_ORACLE}[torch-glm5_next_text]"
_GUESSES = "models/test_draft_head.py::test_a_draft_head_guesses_what_its_layers_do_in_transformers"
_NGRAMS = f"{_ORACLE}[torch-qwen4_exp_text-ngrams]"
_PICTURES = "integration/test_pictures.py::"
_TABLES = "ops/test_tables.py::"
_MEANS = f"{_ORACLE}[torch-qwen4_exp_text]"

SPARSE = (
    Mutant(
        "C28 the tokens of a selected pool are its own",
        "ops/reference/selection.py",
        "blocks.repeat_interleave(rate, dim=1) * rate",
        "(blocks + 1).repeat_interleave(rate, dim=1) * rate",
        _POOLED,
    ),
    Mutant(
        "C28 a pool's key is kept at the place of that pool",
        "layers/compressor.py",
        "self.cache(ctx), blocks.loc)",
        "self.cache(ctx), (blocks.loc - 1).clamp(min=0))",
        _POOLED,
    ),
    Mutant(
        "C28 a query reads the tokens behind the last whole pool, itself among them",
        "ops/reference/selection.py",
        "totals = torch.where(selects, whole + ends % rate, 0)",
        "totals = torch.where(selects, whole, 0)",
        _POOLED,
    ),
    Mutant(
        "C28 a pool's key is a mean of normed keys",
        "layers/pooled_indexer.py",
        "k = ops.norms.layer_norm(self._k_layer(ctx, x), self._norm_weight, self._norm_bias, _NORM_EPS)",
        "k = self._k_layer(ctx, x)",
        _POOLED,
    ),
    Mutant(
        "C28 the norms of latent vectors have the model's epsilon where transformers has it so",
        "models/families/glm5_next_text.py",
        "rope=None, norm_eps=config.rms_norm_eps)",
        "rope=None, norm_eps=0.1)",
        _POOLED,
    ),
    Mutant(
        "C28 streams are joined by their mean",
        "layers/streams.py",
        "return ops.pictures.mean_rows(streams.view(-1, streams.shape[1] // self._num_streams), self._num_streams)",
        "return streams[:, : streams.shape[1] // self._num_streams].contiguous()",
        _POOLED,
    ),
    Mutant(
        "C28 the mean key of a pool is rotated as the pool's first token",
        "layers/pooled_indexer.py",
        "first = self._pools.first_positions(ctx, blocks)",
        "first = self._pools.first_positions(ctx, blocks) + 1",
        _MEANS,
    ),
    Mutant(
        "C28 the mean key of a pool is rotated by all positions of a picture's token",
        "layers/pooled_indexer.py",
        "first = self._pools.first_positions(ctx, blocks)",
        "first = self._pools.first_positions(ctx, blocks)[:1].expand(3, -1).contiguous()",
        _PICTURES + "test_tokens_and_log_probabilities_equal_those_of_transformers[qwen4_exp-ngrams]",
    ),
    Mutant(
        "C28 queries of an indexer are rotated by all positions of a picture's token",
        "layers/pooled_indexer.py",
        "ctx.rotated_by(self._axes), self._cos_sin, axes=self._axes)",
        "ctx.positions.expand(3, -1).contiguous(), self._cos_sin, axes=self._axes)",
        _PICTURES + "test_tokens_and_log_probabilities_equal_those_of_transformers[qwen4_exp-ngrams]",
    ),
    Mutant(
        "C24 C28 a pool that an earlier step began is rotated as the token there",
        "layers/compressor.py",
        "return self._ops.compression.first_positions(ctx.rotated_by(self._axes), kept, blocks)",
        "return self._ops.compression.first_positions(ctx.rotated_by(self._axes), kept.clone(), blocks)",
        _PICTURES + "test_tokens_and_log_probabilities_equal_those_of_transformers[qwen4_exp-ngrams]",
    ),
    Mutant(
        "C28 the mean of a pool's keys is normed, not the keys",
        "layers/pooled_indexer.py",
        "pools = ops.norms.rms_norm(means, self._k_norm, self._eps).unsqueeze(1)",
        "pools = means.clone().unsqueeze(1)",
        _MEANS,
    ),
    Mutant(
        "C28 attention with an indexer reads the tokens that it selects",
        "layers/attention.py",
        "self._attend(ctx, q, k, v, selected=selected)",
        "self._attend(ctx, q, k, v)",
        _MEANS,
    ),
    Mutant(
        "C28 each stream has a norm weight of its own",
        "layers/norms.py",
        "ops.norms.rms_norm(stream, weight, eps) for stream",
        "ops.norms.rms_norm(stream, weights[0], eps) for stream",
        _MEANS,
    ),
    Mutant(
        "C28 the gates that read streams see a silu of their low rank",
        "layers/gated_streams.py",
        "elementwise.mul_sigmoid(down, down)",
        "down",
        _MEANS,
    ),
    Mutant(
        "C28 the gates that write streams are up to 2",
        "layers/gated_streams.py",
        "writer.of(normed)), 2.0)",
        "writer.of(normed)), 1.0)",
        _MEANS,
    ),
    Mutant(
        "C28 a table's row is that of the token's own n-gram, not of its neighbour",
        "ops/reference/tables.py",
        "mixed.unsqueeze(1) % hashes.sizes[heads] + hashes.offsets[heads]",
        "(mixed.unsqueeze(1) + 1) % hashes.sizes[heads] + hashes.offsets[heads]",
        _NGRAMS,
    ),
    Mutant(
        "C28 the layer that drafts for GLM-5.3-Flash has its gates and values cut, as the model's own",
        "models/families/glm5_next_text.py",
        "feed_forward(drafting, layer, limit=config.limit)",
        "feed_forward(drafting, layer)",
        _GUESSES + "[torch-glm5_next_text]",
    ),
    Mutant(
        "C28 the layer that drafts for a model of several streams adds the next token's embedding to each",
        "layers/draft_head.py",
        "residual = ops.elementwise.concat([own] * spec.num_streams)",
        "residual = ops.elementwise.zeros_like(x)",
        _GUESSES + "[torch-qwen4_exp_text]",
    ),
    Mutant(
        "C28 the layer that drafts for DeepSeek-V4 joins its streams by weights of its own",
        "models/families/deepseek_v4.py",
        'streams=streams_spec(config, config.hyper, name=f"{name}.hc_head_"),',
        "streams=streams_spec(config, config.hyper),",
        _GUESSES + "[torch-deepseek_v4]",
    ),
    Mutant(
        "C28 Qwen 4 norms all streams of a token together before the layer that drafts",
        "layers/draft_head.py",
        "width = len(of_hidden)",
        "width = spec.hidden_size\n        of_hidden = of_hidden[:width]",
        _GUESSES + "[torch-qwen4_exp_text]",
    ),
    Mutant(
        "C17 a layer that drafts from streams is fed with the model's, before they are joined",
        "models/decoder.py",
        "drafted_from = hidden if self._num_drafted == 1 else residual",
        "drafted_from = ops.elementwise.concat([hidden] * self._num_drafted)",
        _GUESSES + "[torch-deepseek_v4]",
    ),
    Mutant(
        "C30 values of a draft layer with a window are cleared in the pages of the window",
        "runtime/drafts/head.py",
        "ctx.pages(kind).out_cache_loc, finite)",
        "ctx.full.out_cache_loc, finite)",
        "runtime/test_draft_head.py::test_c30_what_is_not_finite_in_a_head_alone_harms_nobody_and_is_not_kept"
        "[torch-mellum]",
    ),
    Mutant(
        "C28 tables that are read by row are in the files, not in memory",
        "families/checkpoint.py",
        "            if not is_by_row(name)\n",
        "",
        "cli/test_row_tables.py::test_weight_shapes_leave_out_tables_that_are_read_by_row",
    ),
    Mutant(
        "C28 tokens before the end of a text are in no n-gram behind it",
        "ops/reference/tables.py",
        "ends = (token < 0) | ((nearer == hashes.end) if i else torch.zeros_like(token, dtype=torch.bool))",
        "ends = token < 0",
        _TABLES + "test_ngram_rows_are_those_of_each_token_and_the_tokens_before",
    ),
    Mutant(
        "C28 the tokens before a step are those of its request",
        "layers/ngrams.py",
        "taps[past - 1 - i, i] = 1.0",
        "taps[past - 2 - i, i] = 1.0",
        _NGRAMS,
    ),
    Mutant(
        "C28 the taps of the convolution of n-grams lie apart",
        "layers/ngrams.py",
        "taps[:: ngrams.longest] = kernel.squeeze(1).T",
        "taps[-ngrams.width :] = kernel.squeeze(1).T",
        _NGRAMS,
    ),
    Mutant(
        "C5 a selection of pools that failed selects nothing, not the open pool",
        "ops/reference/selection.py",
        "((counts > 0) | (ends < rate))",
        "(counts >= 0)",
        _OPS + "test_tokens_of_selected_blocks_are_those_of_the_blocks_and_of_the_open_one",
    ),
    Mutant(
        "C28 a query selects among the tokens that it sees",
        "ops/reference/selection.py",
        ".masked_fill_(~visible_keys(at, lens[i], 0), -torch.inf)",
        "",
        _OPS + "test_selected_tokens_are_the_reference_s_ties_included",
    ),
    Mutant(
        "C28 of equal scores the earlier token is selected",
        "ops/reference/selection.py",
        "order = order.sort(dim=-1, descending=True, stable=True).indices",
        "order = lens[i] - 1 - order.flip(-1).sort(dim=-1, descending=True, stable=True).indices",
        _OPS + "test_of_equal_scores_the_earlier_token_is_selected",
    ),
    Mutant(
        "C5 a query whose own index key is not finite selects nothing",
        "ops/reference/selection.py",
        "fails = k[at, 0].isnan() | (",
        "fails = torch.zeros(len(at), dtype=torch.bool) | (",
        _OPS + "test_a_query_whose_key_is_not_a_number_selects_nothing_and_its_attention_is_nan",
    ),
    Mutant(
        "C28 attention reads the selected tokens alone",
        "layers/latent_attention.py",
        "            return self._indexer(ctx, x, q_latent)\n",
        "            self._indexer(ctx, x, q_latent)\n            return None\n",
        _ORACLE,
    ),
    Mutant(
        "C28 a layer without an indexer reads what the last one before it selected",
        "layers/indexer.py",
        "ctx.carried.selection = selected",
        "ctx.carried.selection = ctx.carried.selection or selected",
        _ORACLE,
    ),
    Mutant(
        "C28 index keys are those of their own tokens, norm and all",
        "layers/indexer.py",
        "change=lambda tensor: in_order(tensor, rows)",
        "change=lambda tensor: tensor",
        _ORACLE,
    ),
)
