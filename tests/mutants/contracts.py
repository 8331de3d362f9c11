"""The contracts in words, `docs/contracts.md` made of them, and the tables of the rules that mutants remove."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tests.mutants.mutant import REPOSITORY, Mutant

PAGE: Final = REPOSITORY / "docs" / "contracts.md"


class Contract(NamedTuple):
    name: str
    words: str
    kept_in: str  # modules below `forebay/`; empty: not built
    not_built: str = ""


CONTRACTS: Final = {
    "C1": Contract(
        "Request rows",
        "`req_to_token` has one row more than can be allocated: row 0 is padding and always zero. `alloc` returns all "
        "rows or none, in request order, and a request that has a row keeps it. `clear` restores everything but the "
        "generations, by which a reused row is always recognised.",
        "memory/req_to_token_pool.py, memory/slots.py",
    ),
    "C2": Contract(
        "Rows of a decode server",
        "`size` rows for running requests and `pre_alloc_size` more for requests whose KV is still being transferred.",
        "memory/req_to_token_pool.py",
    ),
    "C3": Contract(
        "Rows with states",
        "The mappings from rows to state slots are sized by rows; row 0 maps to slot 0. If a slot cannot be "
        "allocated, no row is lost; if a row cannot be allocated, no slot is lost.",
        "memory/kinds/state/hybrid_rows.py",
    ),
    "C4": Contract(
        "State slots of a decode server",
        "Their number covers running and pre-allocated requests. A smaller setting is raised before memory is "
        "divided, with one warning that has the numbers.",
        "memory/kinds/state/hybrid_rows.py, memory/division.py",
    ),
    "C5": Contract(
        "The padding page",
        "Page 0 is never allocated. Writes without effect go there, and no live row reads it.",
        "memory/slots.py, memory/kv_allocator.py, ops/",
    ),
    "C6": Contract(
        "State slots",
        "Slot 0 is padding. A slot has zeros or the copied state before the first layer reads it, and the source of a "
        "copy stays until the step that copies it has completed.",
        "memory/kinds/state/hybrid_rows.py, memory/kinds/state/cached_states.py, memory/kinds/state/recurrent.py, "
        "pools/table.py",
    ),
    "C7": Contract(
        "Allocation groups",
        "One per prefill pass. Its unused slots count as available and are freed on every exit; nested and repeated "
        "groups lose none.",
        "memory/slots.py, memory/kinds/state/hybrid_rows.py, scheduler/admission.py",
    ),
    "C8": Contract(
        "Conservation",
        "Each row, page and slot is in exactly one of free, one request's, the cache's, a group's, quarantined. A "
        "violation is found and attributed; in production it is counted and the slot is quarantined.",
        "memory/slots.py, memory/holding.py, scheduler/audit.py",
    ),
    "C9": Contract(
        "The batch's columns",
        "Columns are by row, as on the device; a batch is an array of rows. So filtering, merging and every "
        "`prepare_for_*` move ids only, and cannot omit a column.",
        "memory/holding.py, requests/schedule_batch.py",
    ),
    "C10": Contract(
        "The host owns the ids",
        "Rows and locations exist on the host first; the device reads one packed copy of them.",
        "scheduler/step_draft.py, requests/step_plan.py, runtime/steps/inputs.py",
    ),
    "C11": Contract(
        "No copies back",
        "A decode step copies its sampled tokens to the host, and nothing else.",
        "runtime/model_runner.py",
    ),
    "C12": Contract(
        "Outrun values",
        "While a step in flight verifies draft tokens, the host has an upper bound of a row's length. The length "
        "itself is known once the step has committed: reading it before raises `Outrun`.",
        "memory/holding.py",
    ),
    "C13": Contract(
        "Padded rows",
        "The same code pads every captured step. Each column declares its pad; a column without a source in this step "
        "is padded whole.",
        "pools/table.py, requests/step_plan.py, runtime/steps/decode.py, runtime/steps/extend.py",
    ),
    "C14": Contract(
        "Padded replays touch nothing",
        "Row 0, page 0 and slot 0 hold their pads or finite scratch after any number of replays, and no live row "
        "differs by a bit.",
        "runtime/graphs/runner.py, pools/table.py",
    ),
    "C15": Contract(
        "Graphs equal Python",
        "The outputs of a replay are those of the step's Python, for every batch that fits.",
        "runtime/graphs/runner.py",
    ),
    "C16": Contract(
        "Speculation changes no token",
        "A draft token is accepted if the ordinary sampler would draw it at that position, so sampled tokens are the "
        "same with and without speculation; KV and states afterwards are those of as many plain steps. Tokens after a "
        "request's end are not sent, counted or cached.",
        "ops/reference/accept.py, scheduler/scheduler.py, scheduler/output_processor.py, scheduler/memory/allocator.py",
    ),
    "C17": Contract(
        "One loop for all drafts",
        "For every drafter, on the host, in the model or beside it, a step verifies the draft tokens and accepts "
        "those that the sampler would have chosen. A wrong draft lowers acceptance and has no other effect. A "
        "query-only assistant reads the model's KV, writes none, and attends to a fixed prefix while it drafts.",
        "scheduler/scheduler.py, runtime/steps/verify.py, runtime/steps/proposer.py, runtime/drafts/head.py, "
        "runtime/drafts/frozen.py, runtime/drafts/model.py, models/assistant.py, models/drafter.py, models/eagle.py, "
        "ops/reference/accept.py, ops/reference/drafting.py",
    ),
    "C18": Contract(
        "The prefix cache resumes what is whole",
        "A hit ends at a length at which every kind of cache can resume. A state is adopted with the length for which "
        "it is valid, once the step that wrote it has completed.",
        "memory/radix_cache.py, memory/radix_index.py, memory/kinds/state/cached_states.py, "
        "memory/kinds/state/recurrent.py, memory/kinds/window/windows.py, memory/kinds/window/cached_windows.py, "
        "memory/anchors.py",
    ),
    "C19": Contract(
        "Hits change no token",
        "Cold, hit, branch, evicted and hit again give the same tokens.",
        "memory/radix_index.py, memory/radix_cache.py, scheduler/memory/allocator.py",
    ),
    "C20": Contract(
        "Every miss has a reason",
        "The answer and the metrics report it.",
        "memory/miss_reason.py, memory/radix_index.py, scheduler/admission.py",
    ),
    "C21": Contract(
        "Prefill and decode on servers of their own",
        "The caches of a prompt are transferred from prefill to decode, and the tokens are those of a single server. "
        "Decode has no prefix cache by default; `extra_buffer` becomes `no_buffer` there, with a warning.",
        "scheduler/handoff.py, scheduler/tickets.py, scheduler/prefill_role.py, scheduler/matches.py, "
        "scheduler/decode_role.py, scheduler/offers.py, scheduler/arrivals.py, transfer/, "
        "engine/loop/exchange.py, config/disaggregation.py, server/api/core/rendezvous.py, route/",
    ),
    "C22": Contract(
        "A peer's failure",
        "If a peer dies, or messages are lost, late, duplicated or altered, both sides get the right tokens or one "
        "typed error. Slots that the peer may still write are not reused before it confirms that it will not, or its "
        "process has ended.",
        "transfer/",
    ),
    "C23": Contract(
        "Sparse KV in host memory",
        "All KV of layers that read selected tokens is in the host tier when a step has written it. A decoding "
        "request has a bounded hot buffer on the device, bound without a copy to the host. Tokens are those of full "
        "KV.",
        "pools/tiers.py, pools/cuda_range.py, ops/reference/tiers.py, runtime/kinds/resident.py, "
        "memory/kinds/resident/",
    ),
    "C24": Contract(
        "Compressed attention",
        "Entries of whole blocks lie in the pages of KV. States of open blocks lie in rings, located by the page map "
        "of windows or by the request row; padded rows use ring 0. The position decides which places are empty. "
        "Rejected tokens are overwritten before they are read.",
        "ops/reference/compression.py, memory/kinds/ring/, pools/cache_spec.py",
    ),
    "C25": Contract(
        "Sleep and wake",
        "Memory of caches, weights and graphs is released and mapped again without a restart, at the same addresses. "
        "Every pool is then as after `clear`, generations excepted; tokens are the same, or of one version of the "
        "weights that the answer names. If a wake fails, the engine stays asleep.",
        "pools/regions.py, scheduler/halt.py, engine/lifecycle/",
    ),
    "C26": Contract(
        "Retraction",
        "A retracted request continues later with the same tokens. The victim is the last in rank, and never the only "
        "request. A retracted request restarts only with room for all that it may generate, within the stall time-out "
        "or with a typed error.",
        "scheduler/scheduler.py, scheduler/queues.py, scheduler/admission.py, scheduler/memory/host_copies.py, "
        "scheduler/limits.py, runtime/host/host_copies.py",
    ),
    "C27": Contract(
        "Every request ends",
        "A request ends exactly once, with the right tokens or a typed error, within a stated time. It is overtaken "
        "at most 64 times, and the input or failure of another request does not affect it.",
        "scheduler/, engine/, server/",
    ),
    "C28": Contract(
        "The same tokens",
        "Tokens do not depend on the batch, the chunks, the pages, the cache, the graph or a retraction.",
        "runtime/sampling/sampler.py, runtime/sampling/penalties.py, ops/, text/detokenizer.py",
    ),
    "C29": Contract(
        "Nothing of another client's",
        "An answer has no text, token or count of another client beyond what the configured isolation allows.",
        "http/security.py, memory/radix_index.py, scheduler/admission.py",
    ),
    "C30": Contract(
        "Nothing of a failed computation",
        "Values that a failed computation wrote are never adopted, matched, copied or kept as a snapshot.",
        "scheduler/scheduler.py, scheduler/memory/engine_memory.py, scheduler/memory/host_copies.py, "
        "runtime/overlap.py",
    ),
    "C31": Contract(
        "Bits have known causes",
        "Bits of results depend only on the model, the variant of the kernels and the numeric settings; stored data "
        "names its variant.",
        "ops/compiler.py, ops/",
    ),
    "C33": Contract(
        "Input from others is bounded",
        "Every number, name and length of a peer, a client or a file is checked against its bounds before it is used. "
        "An error while it is handled ends that session, request or load, and nothing else.",
        "transfer/wire/frames.py, transfer/session/connection.py, http/security.py, route/",
    ),
    "C34": Contract(
        "Exact keys",
        "Everything that changes a request's tokens (weights, adapter, images) is part of its cache namespace or "
        "cache key, exactly, and never as a truncated hash.",
        "memory/pictures.py, memory/radix_cache.py, requests/request.py",
    ),
    "C32": Contract(
        "Tenants",
        "API keys share an engine's throughput by their weights. No tenant waits for another's backlog beyond a "
        "stated bound (decision 50), and a full queue rejects requests of the tenant that fills it. The prefix cache "
        "evicts from the tenant that has the most slots for its weight (decision 51). Work before admission has turns "
        "by tenant.",
        "http/preparation.py, scheduler/admission.py, scheduler/displacing.py, scheduler/queues.py, "
        "base/room.py, scheduler/limits.py, memory/radix_node.py, memory/encodings.py",
    ),
}

_BEGINNING: Final = """# Contracts

What the engine guarantees, and the modules that keep it. Each contract is divided into rules, and each rule is an
entry of `tests/mutants/` with a test: `python -m tests.mutants` removes each rule from a copy of the package, and the
test must then fail (`make test-all` does so, too). `python -m tests.mutants 'C5 '` runs the rules of one contract.
The simulator has a list of bugs that it must find (`tests/simulation/mutations.py`), and compares every token with a
reference (C8, C18, C19, C26 to C28).

`python -m tests.mutants --write` writes this page from `tests/mutants/contracts.py`. The site (`make docs`) has the
rules with their tests at its end.
"""
_END: Final = """## The rules and their tests

<!-- made: rules -->
"""


def page() -> str:
    """Return the page as it is in the tree: the contracts without their rules, which change with every mutant."""
    return "\n".join([_BEGINNING, *(_section(number, contract) for number, contract in CONTRACTS.items()), _END])


def _section(number: str, contract: Contract) -> str:
    lines = [f"## {number}: {contract.name}", ""]
    if contract.kept_in:
        places = ", ".join(f"`{place.strip()}`" for place in contract.kept_in.split(","))
        lines += [contract.words, "", f"Kept in {places}."]
    if contract.not_built:
        lines += [f"Not built yet: {contract.not_built}."]
    return "\n".join([*lines, ""])


def rules(mutants: Sequence[Mutant]) -> str:
    """Return a table for each contract: the rules that its mutants remove, and the test that must then fail."""
    parts = []
    for number, contract in CONTRACTS.items():
        held = [mutant for mutant in mutants if number in mutant.contracts]
        if held:
            lines = [
                f"### Rules of {number}: {contract.name}",
                "",
                "| rule | test that fails without it |",
                "|---|---|",
            ]
            parts.append("\n".join([*lines, *(f"| {mutant.words} | `{mutant.test}` |" for mutant in held)]))
    return "\n\n".join(parts)


def write(at: Path = PAGE) -> None:
    at.write_text(page())
