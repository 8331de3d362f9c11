"""Rules of prompts behind which nothing is generated."""

from tests.mutants.mutant import Mutant

_TESTS = "integration/test_pooling.py::"
_SAME = _TESTS + "test_no_shape_of_the_engine_changes_a_bit_of_a_vector_or_of_a_neighbours_tokens"
_SERVER = "server/test_embeddings.py::"

POOLING = (
    Mutant(
        "C26 a prompt that gave way is pooled from its beginning",
        "runtime/sampling/pooling.py",
        "        self._tenants.pop(admission.row, None)\n        if pooling := admission.params.pooling:\n",
        "        if (pooling := admission.params.pooling) and admission.row not in self._tenants:\n",
        "runtime/test_pooling.py::test_a_prompt_that_gave_way_is_seen_from_its_beginning",
    ),
    Mutant(
        "C28 the hidden states of a mean are added in the order of their tokens",
        "runtime/sampling/pooling.py",
        "torch.cat([total.unsqueeze(0), terms])).cumsum(0)[-1]",
        "torch.cat([total.unsqueeze(0), terms])).float().sum(0).double()",
        _SAME,
    ),
    Mutant(
        "C19 C20 only what pools its last token goes on from a hit",
        "requests/request.py",
        "self.pools_all = self.params.pooling is not None and self.params.pooling.kind is not PoolingKind.LAST",
        "self.pools_all = False",
        _SAME,
    ),
    Mutant(
        "C28 behind a prompt that is pooled nothing is sampled",
        "scheduler/step_draft.py",
        "            sample_mask[pooled] = False\n",
        "            pass\n",
        _SAME,
    ),
    Mutant(
        "C27 what a draft head is told of a prompt that is pooled is within the prompt",
        "runtime/drafts/head.py",
        "np.array([int(token[0]) if len(token) else PAD for token in following])",
        "np.array([int(token[0]) for token in following])",
        _TESTS + "test_a_head_that_drafts_is_not_disturbed_by_prompts_that_end_with_a_vector",
    ),
    Mutant(
        "C27 one failure ends all prompts of a request",
        "server/api/core/pooled.py",
        "            batch.abort()\n            _count(",
        "            _count(",
        _SERVER + "test_one_failure_ends_all_others_and_is_told",
    ),
    Mutant(
        "C27 a client that leaves ends its prompts",
        "server/api/core/pooled.py",
        "        context.client.watch.on_gone(batch.leave)\n",
        "",
        _SERVER + "test_c27_a_client_that_leaves_ends_its_prompts",
    ),
)
