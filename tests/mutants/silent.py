"""Mutants of the engine that cannot change a token of an answer to a text on a small hybrid, by their rules.

A mutant is here if its changed line is only about what the reason names, or if it passed the seeds of `tokens.py`.
One that changes tokens in an event that `forebay verify` does not bring about is not here: it counts as missed.
"""

from __future__ import annotations

from typing import Final

_TURNS: Final = "decides who runs, waits or gives way; each request is computed as before"
_LIMITS: Final = "ends a request by a time-out, or not"
_FEWER_HITS: Final = "keeps less or other things in the cache; what is hit is right"
_KEEPS: Final = "keeps memory longer than needed"
_CHECK: Final = "leaves out a check of what the rest of the engine never does"
_COUNT: Final = "changes a counter"
_FAILURE: Final = "is about a step that fails or is not finite"
_DRAFTS: Final = "proposes other draft tokens; what is accepted is what is sampled"
_PICTURES: Final = "the model takes no pictures"
_POOLED: Final = "the model gives no embeddings"
_ROUTERS: Final = "changes what routers learn of the cache, and nothing in the engine"
_REPAIRED: Final = "what was not stored fails its checksum when it is loaded, and is computed again"
_RECORD: Final = "is about what the flight recorder has"
_SEEDS: Final = "changes no answer of 150 simulated seeds (`python -m tests.mutants tokens`)"
_HEAD: Final = "the model has no draft layers"
_PADDING: Final = "is about padding rows, whose tokens stand at place 0 of page 0 and slot 0 whatever the rows hold"
_NEVER_DUE: Final = "a padded snapshot is that of 0 tokens, which no token of a step reaches"

_BY_REASON: Final = {
    _TURNS: (
        "C26 nobody gives way for pages that draft tokens left",
        "C26 the last in rank gives way",
        "C26 rank is by priority first where the policy says so",
        "C26 one whose prompt is under way gives way like the others",
        "C26 the only one running gives way to nobody",
        "C26 nobody gives way for pages that are on their way back",
        "C26 whoever was retracted too often starts alone",
        "C26 whoever was retracted comes back with room for all it may still generate",
        "C26 what was retracted runs before places are offered",
        "C26 a request that comes back from the host waits at its own length",
    ),
    _LIMITS: (
        "C26 a retracted request is not bound by the time-out of the queue",
        "C26 a retracted request that does not come back ends within the stall time-out",
    ),
    _FEWER_HITS: (
        "C18 useless states are evicted first",
        "C18 KV that nobody can go on from is evicted first",
        "C18 of a split node the windows of the upper part go first",
        "C18 the cache takes over windows that it had lost",
        "C18 a flush drops no page that was cached after it had begun",
        "C18 a retained prefix keeps its state",
        "C18 a retained state stays although a later one shadows it",
        "C18 a retained prefix keeps its window",
        "C18 a store has the states at all ends where the device's cache keeps one",
        "C18 a restart finds a prefix whose first part was written again behind the second",
    ),
    _KEEPS: (
        "C18 the windows of a node's upper part can still be evicted when it has been split",
        "C18 windows of a hit that a prompt from elsewhere has left behind are locked no longer",
        "C18 of two equal copies of a window the request keeps none",
        "C26 an ended request drops its copy on the host",
        "C26 what ends before the plan that copies it is not copied",
        "C26 what is saved on the host stays within its limit",
        "C26 a copy on the host is gone when it has been loaded",
        "C19 a flush empties every tier",
    ),
    _CHECK: (
        "C18 a state is adopted with the length it is valid for",
        "C18 a match is pinned in the very state of the tree that it was made of",
        "C26 a load of nothing fails its step before it does anything",
        "C26 what a plan drops it cannot load",
        "C6 no slot is written twice in a step",
        "C13 spans of a plan lie inside its prompts",
        # The version of a match is read by two assertions alone: a match is pinned in the plan that makes it.
        "C18 a match is void when a kind has lost something",
    ),
    _COUNT: (
        "C26 the tokens of a retracted request go on counting",
        "C16 a draft is accepted in part only if a token behind an accepted one was rejected",
    ),
    _FAILURE: (
        "C16 C30 of a request that fails what was chosen before is told",
        "C26 C30 what is not finite ends a request that was retracted meanwhile, and its copy goes",
        "C27 C16 what is not finite behind the first rejection harms nobody",
        "C15 a capture that fails costs no request",
        "C28 C30 a rank on which a capture fails does not go on beside the others",
    ),
    _DRAFTS: ("C16 guesses of the host go to the rows that they are of",),
    _ROUTERS: (
        "C18 routers learn of states",
        "C18 routers learn of a state that a cached prefix gets later",
    ),
    _REPAIRED: ("C19 a step stores before it overwrites",),
    _RECORD: (
        "C19 a failed step is recorded",
        "C19 files that can no longer be written are recorded",
        "C19 an abort is recorded",
        "C19 an event of a transfer is recorded",
        "C19 drafts of the host are recorded",
        "C19 an adapter that is loaded is recorded",
        "C19 the end of requests whose adapter is lost is recorded",
        "C19 pictures of a request are recorded",
        "C19 plans are compared in the places of pictures",
    ),
    _PICTURES: (
        "C28 the row of a prompt that another engine computed has the rotary delta of its pictures",
        "C28 each tile of a picture has the rows of its own tokens",
        "C28 a slice costs what a tile of its size costs",
        "C13 row 0 of the encodings is never written",
        "C28 slices of a tile come in order, those of steps in flight among them",
        "C13 a row's next request has a delta of its own",
        "C28 a token behind a prompt stands at its position plus the delta of its row",
        "C18 a model is given its input id where ids stand for pictures",
    ),
    _POOLED: (
        "C28 C29 tokens have the outputs of the layer that was asked for",
        "C26 a prompt that gave way is pooled from its beginning",
        "C28 the hidden states of a mean are added in the order of their tokens",
        "C28 behind a prompt that is pooled nothing is sampled",
        "C26 a mean is not resumed from a host copy",
        "C16 a prompt is a vector at its last token",
        "C28 a mean is of the tokens of one text",
        "C28 C29 the first token is that of the text itself",
        "C28 a text is computed whole, in one step",
    ),
    _SEEDS: (
        "C16 nobody is asked for more tokens than may still come",
        "C16 first steps have no drafts",
        "C16 guesses are what the grammar allows",
        "C18 C30 a state is adopted when its step has committed",
        "C18 a snapshot is ready when its step has committed and not before",
        "C18 a wish that no step came to leaves what was tracked",
        "C18 of two tracking slots the one with the complete state is not written",
    ),
    _PADDING: (
        "C13 a padded `input_ids` of extend steps is 0",
        'C13 a padded `snap_stops` is "T"',
        "C14 a captured step begins by resetting the padding rows that it writes",
        "C14 a decode step says that it writes the last tokens",
        "C14 the padding row grows in no step that verifies",
        "C14 the padding row grows in no step with prompts",
    ),
    _NEVER_DUE: (
        "C13 a padded `mamba_track_indices` is PAD",
        "C13 a padded `snap_slots` is PAD",
    ),
    _HEAD: (
        "C15 what a graph is fed with is not overwritten by its capture",
        "C16 the device drafts nothing under a grammar",
        "C16 the device drafts nothing for a request under a grammar",
    ),
}
SILENT: Final = {rule: reason for reason, rules in _BY_REASON.items() for rule in rules}
