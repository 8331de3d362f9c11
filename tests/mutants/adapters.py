"""Rules of adapters: whose outputs they change, and by what."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_FILES: Final = "formats/test_adapters.py"
_LOGITS: Final = "models/test_adapters.py::test_adapters_on_all_layers_give_the_logits_of_peft_and_of_merged_weights"
_ENGINE: Final = "engine/test_adapters.py::"
_ROLES: Final = "scheduler/test_adapter_roles.py::"
_TRAFFIC: Final = (
    "simulation/test_adapting.py::"
    "test_adapters_random_traffic_each_request_computes_with_the_adapter_that_it_named[seeds0]"
)

ADAPTERS: Final = (
    Mutant(
        "C13 a token with slot 0 keeps its bits, whatever is in that slot",
        "ops/reference/adapters.py",
        "for slot in range(1, len(table.ranks)):",
        "for slot in range(len(table.ranks)):",
        "ops/test_adapters.py::test_tokens_without_an_adapter_keep_their_bits",
    ),
    Mutant(
        "C28 a slot that is written has nothing left of the adapter before",
        "layers/adapters.py",
        "        self.clear(slot)\n        for layer in packed.layers:\n",
        "        for layer in packed.layers:\n",
        "models/test_adapters.py::test_slot_that_is_written_again_has_nothing_left_of_the_adapter_before",
    ),
    Mutant(
        "C28 rows of B are in the order of the weight's",
        "layers/adapters.py",
        "pair.outputs()[rows[own] - sum(self.param.sizes[: self.layer])]",
        "pair.outputs()[np.sort(rows[own]) - sum(self.param.sizes[: self.layer])]",
        _LOGITS,
    ),
    Mutant(
        "C28 rows of B are multiplied by the factors of the weight's",
        "layers/adapters.py",
        "        if self.param.scales:\n",
        "        if not self.param.scales and self.param.scales:\n",
        f"{_LOGITS}[torch-falcon_h1-mixed]",
    ),
    Mutant(
        "C28 B of k is not applied to the outputs of v",
        "layers/adapters.py",
        "np.flatnonzero(panels[:, 2] == self.layer)",
        "np.flatnonzero(panels[:, 2] == (3 - self.layer if self.layer and layers.max() == 2 else self.layer))",
        _LOGITS,
    ),
    Mutant(
        "C28 the factor is multiplied into B once",
        "formats/adapters.py",
        "_wide(self.b) * np.float32(self.scale)",
        "_wide(self.b) * np.float32(self.scale) ** 2",
        f"{_FILES}::test_adapter_is_read_with_its_factor_in_b",
    ),
    Mutant(
        "C28 alpha_pattern gives layers an alpha of their own",
        "formats/adapters.py",
        "alpha, rank = self.alphas.value(layer), self.rank_of(layer)",
        "alpha, rank = None, self.rank_of(layer)",
        f"{_FILES}::test_patterns_give_alphas_to_layers_as_in_peft",
    ),
    Mutant(
        "C28 of several keys of a pattern the first counts",
        "formats/adapters.py",
        "return min([*found,",
        "return max([*found,",
        f"{_FILES}::test_patterns_give_alphas_to_layers_as_in_peft",
    ),
    Mutant(
        "C28 an adapter that is rank-stabilized is divided by the root of its rank",
        "formats/adapters.py",
        "(math.sqrt(rank) if self.rslora else rank)",
        "rank",
        f"{_FILES}::test_factor_of_rank_stabilized_adapters_is_divided_by_the_root",
    ),
    Mutant(
        "C33 every shape is checked before an entry is read",
        "formats/adapters.py",
        "            _check_shapes(self.file, parts, layers[name], self.config.rank_of(layer), max_rank)\n",
        "            _read_pair(self.file, parts, 1.0)\n"
        "            _check_shapes(self.file, parts, layers[name], self.config.rank_of(layer), max_rank)\n",
        f"{_FILES}::test_no_tensor_is_read_before_all_are_checked",
    ),
    Mutant(
        "C33 a pattern's key is no expression",
        "formats/adapters.py",
        "        if not _PLAIN_KEY.fullmatch(name):\n",
        "        if not _PLAIN_KEY.match(name):\n",
        f"{_FILES}::test_fields_of_other_types_are_rejected_by_name",
    ),
    Mutant(
        "C30 an entry that is not finite is never adopted",
        "formats/adapters.py",
        "            if not np.isfinite(values).all():\n",
        "            if not np.isfinite(values).any():\n",
        f"{_FILES}::test_tensors_that_do_not_fit_are_rejected_by_name",
    ),
    Mutant(
        "C8 a slot of an adapter is free when no step in flight can reference it",
        "scheduler/memory/deferred.py",
        "            self.free(DeferredFree(fence=self._steps.fence(), request_id=owner, holdings=(holding,)))",
        "            holding.kind.return_slots(holding, owner)",
        _TRAFFIC,
    ),
    Mutant(
        "C8 requests count as users of their adapter from their arrival",
        "scheduler/scheduler.py",
        "            self.pools.adapters.enter(req.adapter)\n",
        "",
        _TRAFFIC,
    ),
    Mutant(
        "C8 a load that fails leaves its slot free",
        "engine/lifecycle/adapters.py",
        "                self._adapters.failed(load.adapter)\n",
        "",
        _TRAFFIC,
    ),
    Mutant(
        "C19 nothing is shared between loads of adapters",
        "requests/request.py",
        'f"{weight_version}+{self.adapter.number}" if self.adapter else str(weight_version)',
        "str(weight_version)",
        _ENGINE + "test_a_slot_is_used_again_and_nothing_of_the_adapter_before_is_left",
    ),
    Mutant(
        "C19 a number of a load is not given again",
        "memory/adapters.py",
        "        self._last_number += 1\n",
        "        self._last_number = 1\n",
        "memory/test_adapters.py::"
        "test_a_name_that_is_loaded_again_has_another_number_and_the_old_one_serves_its_requests",
    ),
    Mutant(
        "C22 an offer names the adapter of its request",
        "scheduler/offers.py",
        "            adapter=adapter_of(req),\n",
        "",
        _ROLES + "test_decode_offer_has_the_name_and_the_digest_of_its_requests_adapter",
    ),
    Mutant(
        "C22 prefill compares the digest of an adapter, and not its name alone",
        "scheduler/matches.py",
        "        if offered.adapter != adapter_of(req):",
        "        if offered.adapter.name != adapter_of(req).name:",
        _ROLES + "test_prefill_offer_with_another_adapter_ends_both_halves",
    ),
    Mutant(
        "C8 a request whose offer is refused uses its adapter no longer",
        "scheduler/output_processor.py",
        "        self.pools.adapters.leave(req.adapter)\n",
        "        if was is not Status.PENDING:\n            self.pools.adapters.leave(req.adapter)\n",
        _ROLES + "test_prefill_offer_with_another_adapter_ends_both_halves",
    ),
    Mutant(
        "C22 an offer for an adapter that no request can name is refused at once",
        "scheduler/matches.py",
        "        if name and not (req or name in self.queues.pools.adapters):",
        "        if name and not (req or name):",
        _ROLES + "test_prefill_offer_with_an_adapter_that_nobody_can_name_is_refused_at_once",
    ),
    Mutant(
        "C31 the rounding of an adapter is part of its digest",
        "engine/lifecycle/adapter_memory.py",
        'sha256(f"{files.digest} {slots.dtype}".encode())',
        "sha256(files.digest.encode())",
        _ENGINE + "test_the_digest_of_an_adapter_is_another_where_it_is_rounded",
    ),
    Mutant(
        "C14 a row has the adapter of its request, not of the one before",
        "runtime/steps/inputs.py",
        "        if self._rows.adapter is not None:",
        "        if False:",
        _ENGINE + "test_each_adapter_gives_the_tokens_of_its_merged_checkpoint_and_the_base_its_own",
    ),
    Mutant(
        "C25 a load that was half copied begins again when the memory of the weights is new",
        "engine/lifecycle/adapters.py",
        "                load.copying = self._memory.write(load.adapter.slot, load.files)\n",
        "                pass\n",
        _ENGINE + "test_a_load_that_is_half_copied_when_the_engine_sleeps_is_whole_when_it_is_there",
    ),
    Mutant(
        "C25 nothing is written into released weights",
        "engine/lifecycle/adapters.py",
        "        for load in list(self._loads) if self._is_there() else ():",
        "        for load in list(self._loads):",
        _ENGINE + "test_a_load_waits_while_the_weights_are_released",
    ),
    Mutant(
        "C25 adapters are there after an update that failed",
        "engine/lifecycle/sleep.py",
        "            elif WEIGHTS not in self._released:",
        "            elif False:",
        _ENGINE + "test_adapters_are_there_after_an_update_that_failed",
    ),
    Mutant(
        "C25 adapters are read again when the memory of the weights is new",
        "engine/lifecycle/sleep.py",
        "            if WEIGHTS in tags:\n                self.on_weights(self._loaded)\n",
        "",
        _ENGINE + "test_adapters_are_there_after_a_sleep_and_after_an_update_of_the_weights",
    ),
    Mutant(
        "C28 layers of an outer model are those of the language model inside",
        "models/__init__.py",
        'inner = OUTER_NAMES.sub("", layer)',
        "inner = layer",
        "models/test_outer_adapters.py::test_adapter_of_a_model_with_images_gives_the_logits_of_peft",
    ),
    Mutant(
        "C28 an adapter of an encoder's layer is refused",
        "models/__init__.py",
        "if config.outer is not None and config.outer.is_beside(layer):",
        "if False:",
        "models/test_outer_adapters.py::test_adapter_of_the_encoder_is_refused_by_its_part",
    ),
    Mutant(
        "C8 a load that waits for a slot writes it when its last user has ended",
        "memory/adapters.py",
        "        if self.slots.num_free:\n"
        "            self.note(AdapterChanged(Change.TAKE_SLOT, adapter.name))\n"
        "            adapter.slot = self.slots.take_one(adapter.number)\n",
        "        adapter.slot = self._by_name[adapter.name].slot\n",
        "memory/test_adapters.py::test_replacing_without_a_free_slot_waits_for_the_users_of_the_old_one",
    ),
    Mutant(
        "C27 a slot that a load waits for is not given to another",
        "memory/adapters.py",
        "is_free = self.slots.num_free > self._num_waiting",
        "is_free = self.slots.num_free > 0",
        "memory/test_adapters.py::test_replacing_without_a_free_slot_waits_for_the_users_of_the_old_one",
    ),
    Mutant(
        "C27 an adapter is retired if no other slot becomes free",
        "memory/adapters.py",
        "if self.slots.num_free + len(self._retired) < self._num_waiting:",
        "if True:",
        "memory/test_adapters.py::test_replacing_takes_a_slot_that_drains_before_it_retires_the_old_one",
    ),
    Mutant(
        "C27 choices that name the load they began with are refused only once it is another",
        "memory/adapters.py",
        "        if number and adapter.number != number:",
        "        if number:",
        "memory/test_adapters.py::test_request_that_names_the_load_it_had_finds_that_load_alone",
    ),
)
