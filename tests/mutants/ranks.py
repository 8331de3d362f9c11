"""Rules of models that are split among ranks; see `tests.mutants`."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_LOGITS = "models/test_ranks.py::test_ranks_have_the_logits_of_the_whole_model_to_the_bit"
_PLANS = "runtime/test_ranks.py::test_ranks_carry_out_the_plans_of_one_with_equal_bits"

_THROUGH_MEMORY = "ops/test_triton_exchange.py::test_exchange_"
_ORDERED = f"{_THROUGH_MEMORY}through_memory_counts_behind_its_stores_and_loads_behind_the_counts"
_BY_CONFIGURATION = "engine/ranks/test_exchanges.py::test_exchange_"

RANKS: Final[tuple[Mutant, ...]] = (
    Mutant(
        "C28 C31 a buffer in a GPU's memory is not written again before all ranks have read it",
        "ops/triton/exchange.py",
        "BUFFERS: Final = 2",
        "BUFFERS: Final = 1",
        f"{_THROUGH_MEMORY}in_memory_stays_until_every_rank_has_come_to_the_next_one",
    ),
    Mutant(
        "C28 C31 the two buffers in a GPU's memory alternate",
        "ops/triton/exchange.py",
        "        count += 1\n",
        "        count += 2\n",
        f"{_THROUGH_MEMORY}in_memory_stays_until_every_rank_has_come_to_the_next_one",
    ),
    Mutant(
        "C28 C31 a rank reads no part in a GPU's memory before its rank has counted it",
        "ops/triton/exchange.py",
        "- count < 0:",
        "- count < -1:",
        f"{_THROUGH_MEMORY}through_memory_reads_parts_only_after_all_have_counted",
    ),
    Mutant(
        "C28 C31 counts in a GPU's memory wrap around",
        "ops/triton/exchange.py",
        'tl.atomic_add(other, 0, sem="acquire", scope="sys") - count < 0:',
        'tl.atomic_add(other, 0, sem="acquire", scope="sys") < count:',
        f"{_THROUGH_MEMORY}through_memory_one_after_the_other_never_mixes_two",
    ),
    Mutant(
        "C28 C31 parts in a GPU's memory are those of the ranks in their order",
        "ops/triton/exchange.py",
        "tl.load(buffer + of * LANES * BLOCK, mask=live)",
        "tl.load(buffer + (rank + of) % SIZE * LANES * BLOCK, mask=live)",
        f"{_THROUGH_MEMORY}through_memory_of_a_gpu_gives_each_rank_the_parts_of_all",
    ),
    Mutant(
        "C28 C31 all threads have stored their part in a GPU's memory before one counts it",
        "ops/triton/exchange.py",
        "        tl.debug_barrier()  # all threads have stored before one of them counts for all\n",
        "",
        _ORDERED,
    ),
    Mutant(
        "C28 C31 a count in a GPU's memory releases the part to other processes",
        "ops/triton/exchange.py",
        'sem="release", scope="sys"',
        'sem="relaxed", scope="sys"',
        _ORDERED,
    ),
    Mutant(
        "C28 C31 a rank acquires the parts of other processes with their counts",
        "ops/triton/exchange.py",
        'sem="acquire", scope="sys"',
        'sem="acquire", scope="gpu"',
        _ORDERED,
    ),
    Mutant(
        "C28 C31 a buffer of the exchange is not written again before all ranks have read it",
        "ops/native/exchange.py",
        "BUFFERS: Final = 2",
        "BUFFERS: Final = 1",
        "ops/test_exchange.py::test_exchange_one_after_the_other_never_mixes_two",
    ),
    Mutant(
        "C28 C31 memory of a GPU is zeros before another rank counts in it",
        "engine/lifecycle/exchanges.py",
        "        torch.cuda.synchronize()  # it is zeros before another rank counts in it\n",
        "",
        f"{_BY_CONFIGURATION}through_a_gpu_s_memory_maps_the_same_zeros_on_every_rank",
    ),
    Mutant(
        "C28 steps are not captured without their exchanges",
        "ops/groups.py",
        "return GroupTransport(gloo(store, rank, size, options), in_graphs=False)",
        "return GroupTransport(gloo(store, rank, size, options), in_graphs=True)",
        f"{_BY_CONFIGURATION}of_a_configuration_gives_each_rank_the_parts_of_all",
    ),
    Mutant(
        "C28 C30 a rank on which a capture fails does not go on beside the others",
        "runtime/graphs/runner.py",
        "            if not expected:\n                self._failed()\n",
        "",
        "runtime/test_ranks.py::test_rank_on_which_a_capture_fails_ends_all",
    ),
    Mutant(
        "C33 NCCL is refused for ranks that share a GPU",
        "config/ranks.py",
        "and exchange == RankExchange.NCCL and facts.gpu.count < size:",
        "and exchange == RankExchange.NCCL and facts.gpu.count < 1:",
        "config/test_ranks.py::test_ranks_that_gpus_cannot_have_are_refused_in_one_line",
    ),
    Mutant(
        "C28 of equal logits of several ranks the token with the lowest id is taken",
        "ops/reference/sampling.py",
        "first = (logits == top.unsqueeze(-1)).to(torch.uint8).argmax(dim=-1)",
        "first = logits.shape[1] - 1 - (logits == top.unsqueeze(-1)).flip(-1).to(torch.uint8).argmax(dim=-1)",
        "ops/test_exchange.py::test_exchange_of_equal_logits_leaves_the_lowest_id_the_most_likely",
    ),
    Mutant(
        "C28 C31 a norm of all heads is not one of a rank's heads",
        "layers/attention.py",
        "self._exchange.gather(part, self._heads.units), weight, self._spec.norm_eps)",
        "part.repeat(1, len(weight) // part.shape[1]), weight, self._spec.norm_eps)",
        _LOGITS,
    ),
    Mutant(
        "C28 C31 a group of Mamba-2 that several ranks have is normed as a whole",
        "layers/mamba2.py",
        "gated_rms_norm(gather(y), gather(gate), self._norm)",
        "gated_rms_norm(y.repeat(1, len(self._norm.weight) // y.shape[1]), gather(gate), self._norm)",
        "models/test_ranks.py::test_ranks_more_than_groups_norm_whole_groups",
    ),
    Mutant(
        "C28 C31 heads of a recurrence have B and C of their own group",
        "layers/mamba2.py",
        "(whole.num_groups, groups, whole.state_size)",
        "(whole.num_groups, range(len(groups)), whole.state_size)",
        _LOGITS,
    ),
    Mutant(
        "C28 C31 heads of a gated delta net have the key head of their own group",
        "layers/gated_delta.py",
        "(whole.num_key_heads, keys, whole.key_head_dim)",
        "(whole.num_key_heads, range(len(keys)), whole.key_head_dim)",
        _LOGITS,
    ),
    Mutant(
        "C28 ranks that share a KV head have that of their query heads",
        "ops/exchange.py",
        "range(self.rank * count // self.size, self.rank * count // self.size + 1)",
        "range(0, 1)",
        "models/test_ranks.py::test_ranks_more_than_kv_heads_have_copies_of_these",
    ),
    Mutant(
        "C28 a token that rank 0 chooses is that of all ranks before the next step reads it",
        "runtime/steps/forward.py",
        "        for of_rank_0 in (token_ids, finite):\n            self._exchange.spread(of_rank_0)\n",
        "",
        _PLANS,
    ),
    Mutant(
        "C28 a token that rank 0 draws is that of all ranks before the next step reads it",
        "runtime/steps/chooser.py",
        "        for of_rank_0 in (chosen.token_ids, chosen.finite):\n            self._exchange.spread(of_rank_0)\n",
        "",
        _PLANS,
    ),
    Mutant(
        "C30 a step in which another rank has ended has no result",
        "ops/native/exchange.py",
        "        if self._lost(self._address):\n",
        "        if False:\n",
        "ops/test_exchange.py::test_exchange_that_is_ended_ends_the_waits_of_the_others",
    ),
    Mutant(
        "C33 a part that does not say that it is built for ranks is not split among them",
        "models/shares.py",
        'getattr(part, "for_ranks", False)',
        'getattr(part, "for_ranks", True)',
        "models/test_ranks.py::test_model_with_parts_that_are_not_built_for_ranks_is_refused_with_their_names",
    ),
)
