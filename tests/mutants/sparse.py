"""Rules of sparse attention: which tokens are selected, and whose selection a layer reads."""

from tests.mutants.mutant import Mutant

_OPS = "ops/test_selection.py::"
_ORACLE = "models/test_oracle.py::test_prefill_gives_the_logits_of_transformers"

SPARSE = (
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
