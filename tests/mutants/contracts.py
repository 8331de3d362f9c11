"""The contracts in words, and `docs/contracts.md` made of them and of the mutants."""

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
        "`req_to_token` has a row more than may be handed out: row 0 is padding, all zero at all times. `alloc` "
        "gives all or nothing, in request order, and who holds a row keeps it. `clear` restores everything but "
        "the generations, which tell a reused row for ever.",
        "memory/req_to_token_pool.py, memory/slots.py",
    ),
    "C2": Contract(
        "Rows of a decode server",
        "`size` rows for running requests and `pre_alloc_size` more for those whose KV is still coming.",
        "memory/req_to_token_pool.py",
        "the server that uses them",
    ),
    "C3": Contract(
        "Rows with states",
        "The mappings from rows to state slots are sized by rows; row 0 maps to slot 0; no row is lost when a "
        "slot cannot be had, and no slot when a row cannot.",
        "memory/kinds/state/hybrid_rows.py",
    ),
    "C4": Contract(
        "State slots of a decode server",
        "As many as running and pre-allocated requests need, raised before memory is divided, with one warning "
        "that has the numbers.",
        "memory/kinds/state/hybrid_rows.py, memory/division.py",
    ),
    "C5": Contract(
        "The padding page",
        "Page 0 is handed out to nobody; what must go nowhere is written there; no live row reads it.",
        "memory/slots.py, memory/kv_allocator.py, ops/",
    ),
    "C6": Contract(
        "State slots",
        "Slot 0 is padding. A slot holds zeros or the copied state before the first layer reads it, and what is "
        "copied stays until the step that copies it has completed.",
        "memory/kinds/state/hybrid_rows.py, memory/kinds/state/cached_states.py, "
        "memory/kinds/state/recurrent.py, pools/table.py",
    ),
    "C7": Contract(
        "Allocation groups",
        "One per prefill pass. Its unused slots count as available and go back however it is left; nested and "
        "repeated groups lose none.",
        "memory/slots.py, memory/kinds/state/hybrid_rows.py, scheduler/admission.py",
    ),
    "C8": Contract(
        "Conservation",
        "Each row, page and slot is in exactly one of free, one request's, the cache's, a group's, quarantined. "
        "What goes wrong is found and attributed; in production it is counted, quarantined, and survived.",
        "memory/slots.py, memory/holding.py, scheduler/audit.py",
    ),
    "C9": Contract(
        "The batch's columns",
        "By row, as the device's are; a batch is an array of rows, so that filtering, merging and every "
        "`prepare_for_*` move ids, and none can forget a column.",
        "memory/holding.py, requests/schedule_batch.py",
    ),
    "C10": Contract(
        "The host owns the ids",
        "Rows and locations exist on the host first; what the device reads is one packed copy of them.",
        "scheduler/step_draft.py, requests/step_plan.py, runtime/step_inputs.py",
    ),
    "C11": Contract(
        "No copies back",
        "A decode step copies its sampled tokens to the host, and nothing else.",
        "runtime/model_runner.py",
    ),
    "C12": Contract(
        "Outrun values",
        "While a step in flight verifies draft tokens the host knows how long a row can become, and the length "
        "itself only when the step has committed: reading it before raises `Outrun`.",
        "memory/holding.py",
    ),
    "C13": Contract(
        "Padded rows",
        "Every captured step is padded by the same code; each column declares its pad; one without a source in "
        "this step is padded whole.",
        "pools/table.py, requests/step_plan.py, runtime/decode_step.py, runtime/extend_step.py",
    ),
    "C14": Contract(
        "Padded replays touch nothing",
        "Row 0, page 0 and slot 0 hold their pads or finite scratch after any number of replays, and no live row "
        "differs by a bit.",
        "runtime/graph_runner.py, pools/table.py",
    ),
    "C15": Contract(
        "Graphs equal Python",
        "The outputs of a replay are those of the step's Python, for every batch that fits.",
        "runtime/graph_runner.py",
    ),
    "C16": Contract(
        "Speculation changes no token",
        "A guess is accepted where it is the token that the ordinary sampler draws there, so sampled tokens are "
        "the same with and without, too; KV and states afterwards are those of as many plain steps. Nothing behind "
        "a request's end is told, counted or cached.",
        "ops/accept.py, scheduler/scheduler.py, scheduler/output_processor.py, scheduler/releases.py",
    ),
    "C17": Contract(
        "One loop for all drafts",
        "Whoever drafts, on the host, in the model or beside it: a step verifies what was drafted, accepts what the "
        "sampler would have chosen, and a draft can cost acceptance alone. A query-only assistant reads the model's "
        "KV, writes none, and sees a fixed prefix while it drafts.",
        "scheduler/scheduler.py, runtime/verify_step.py, runtime/device_proposer.py, runtime/draft_head.py, "
        "runtime/frozen_draft.py, runtime/draft_model.py, models/assistant.py, models/drafter.py, models/eagle.py, "
        "ops/accept.py, ops/drafting.py",
    ),
    "C18": Contract(
        "The prefix cache resumes what is whole",
        "A hit ends where every kind of state can go on. A state is adopted with the length it is valid for, when"
        " the step that wrote it has completed.",
        "memory/radix_cache.py, memory/radix_index.py, memory/kinds/state/cached_states.py, "
        "memory/kinds/state/recurrent.py, memory/kinds/window/windows.py, memory/anchors.py",
    ),
    "C19": Contract(
        "Hits change no token",
        "Cold, hit, branch, evicted and hit again give the same tokens.",
        "memory/radix_index.py, memory/radix_cache.py, scheduler/releases.py",
    ),
    "C20": Contract(
        "Every miss has a reason",
        "And the client and the metrics can see it.",
        "memory/miss_reason.py, memory/radix_index.py, scheduler/admission.py",
    ),
    "C21": Contract(
        "Prefill and decode on servers of their own",
        "What layers keep of a prompt goes from one to the other, and the tokens are those of one. Decode keeps no "
        "prefix cache unless asked; an extra buffer that was asked for becomes `no_buffer`, with a warning.",
        "scheduler/handoff.py, scheduler/prefill_role.py, scheduler/decode_role.py, transfer/, "
        "engine/loop/exchange.py, config/disaggregation.py, server/api/rendezvous.py, route/",
    ),
    "C22": Contract(
        "A peer's failure",
        "Its death, and messages that are lost, late, doubled or altered, end in the right tokens or one typed error,"
        " on both sides. Places that it may still write to are not used again before it says that it will not, or "
        "its process has died.",
        "transfer/",
    ),
    "C23": Contract(
        "Sparse KV in host memory",
        "All KV of layers that read selected tokens is in the host tier when a step has written it. A decoding request "
        "has a bounded hot buffer on the device, bound without a copy to the host. Tokens are those of full KV.",
        "pools/tiers.py, ops/tiers.py, runtime/kinds/resident.py, memory/kinds/resident/",
        "the host tier of a GPU",
    ),
    "C24": Contract(
        "Compressed attention",
        "Entries of whole blocks lie in the pages of KV. States of open blocks lie in rings, located by the page map "
        "of windows or by the request row; padded rows use ring 0. Position decides which places are empty. What is "
        "rejected is overwritten before anything reads it.",
        "ops/compression.py, memory/kinds/ring/, pools/cache_spec.py",
    ),
    "C25": Contract(
        "Sleep and wake",
        "Memory of caches, weights and graphs is given back and taken again without a restart, at the same addresses. "
        "Every pool is then as after `clear`, generations excepted; tokens are the same, or of one version of the "
        "weights that the answer names. What fails while waking leaves the engine asleep.",
        "pools/regions.py, scheduler/halt.py, engine/lifecycle/",
    ),
    "C26": Contract(
        "Retraction",
        "Who gives up its memory goes on later with the same tokens. The last in rank gives way, the only one to "
        "nobody; whoever gave way comes back with room for all that it may generate, and within the stall time-"
        "out or with a typed error.",
        "scheduler/scheduler.py, scheduler/queues.py, scheduler/admission.py, scheduler/offload.py, "
        "scheduler/limits.py, runtime/host_copies.py",
    ),
    "C27": Contract(
        "Every request ends",
        "Exactly once, with the right tokens or a typed error, within a stated time. Nobody is overtaken more "
        "than 64 times, and no other request's input or failure harms it.",
        "scheduler/, engine/, server/",
    ),
    "C28": Contract(
        "The same tokens",
        "Whatever the batch, the chunks, the pages, the cache, the graph or a retraction around a request.",
        "runtime/sampler.py, runtime/penalties.py, ops/, text/detokenizer.py",
    ),
    "C29": Contract(
        "Nothing of another client's",
        "No text, no token, and no count beyond what the configured isolation says.",
        "server/http/security.py, memory/radix_index.py, scheduler/admission.py",
    ),
    "C30": Contract(
        "Nothing of a failed computation",
        "What it wrote is never adopted, matched, copied or snapshotted.",
        "scheduler/scheduler.py, scheduler/releases.py, scheduler/offload.py, runtime/overlap.py",
    ),
    "C31": Contract(
        "Bits have known causes",
        "They depend on the model, the variant of the kernels and the numeric settings alone; a variant is part "
        "of what is stored.",
        "ops/compiler.py, ops/",
    ),
    "C33": Contract(
        "What others supply is bounded",
        "Every number, name and length of a peer, a client or a file is bounded before it is used; an error while "
        "one of them is handled ends that session, request or load, and nothing else.",
        "transfer/wire/frames.py, transfer/session/connection.py, server/http/security.py, route/",
    ),
    "C34": Contract(
        "Exact keys",
        "Whatever changes a request's tokens (weights, adapter, images) is part of its cache namespace or of its cache "
        "key, exactly, never by a truncated hash.",
        "memory/pictures.py, memory/radix_cache.py, requests/request.py",
    ),
    "C32": Contract(
        "Tenants",
        "API keys share an engine's throughput by their weights. No tenant waits for another's backlog beyond a stated "
        "bound (decision 50), and a full queue rejects requests of the tenant that fills it. The prefix cache evicts "
        "from the tenant that holds the most for its weight (decision 51). Work before admission has turns by tenant "
        "(decision 64).",
        "server/http/preparation.py, scheduler/admission.py, scheduler/displacing.py, scheduler/queues.py, "
        "scheduler/limits.py, memory/radix_node.py",
    ),
}

_BEGINNING: Final = """# Contracts

What the engine guarantees, where it is kept, and which test fails when a rule of it is taken out. Each line of the
tables is an entry of `tests/mutants/`: `python -m tests.mutants` takes each rule out of a copy of the package and runs
that test, which must fail; `make test-all` does so, too. The simulator has its own list of bugs that it must find
(`tests/simulation/mutations.py`), on every commit, and compares every token with a reference (C8, C18, C19, C26 to
C28).

This page is made by `python -m tests.mutants --write`.
"""


def page(mutants: Sequence[Mutant]) -> str:
    return "\n".join([_BEGINNING, *(_section(number, mutants) for number in CONTRACTS)])


def _section(number: str, mutants: Sequence[Mutant]) -> str:
    name, words, kept_in, not_built = CONTRACTS[number]
    lines = [f"## {number}: {name}", ""]
    if words:
        places = ", ".join(f"`{place.strip()}`" for place in kept_in.split(","))
        lines += [words, "", f"Kept in {places}."]
    if not_built:
        lines += [f"Not built yet: {not_built}."]
    held = [mutant for mutant in mutants if number in mutant.contracts]
    if held:
        lines += ["", "| rule that is taken out | test that fails |", "|---|---|"]
        lines += [f"| {mutant.words} | `{mutant.test}` |" for mutant in held]
    return "\n".join([*lines, ""])


def write(mutants: Sequence[Mutant], at: Path = PAGE) -> None:
    at.write_text(page(mutants))
