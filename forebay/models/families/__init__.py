"""The descriptions of the model families: a module each, named by the `model_type`, which `models.describe` imports.

A module has `block(config, layer) -> BlockSpec`, with `DECODER` for the parts around the blocks (options of
`decoder_spec`), or `describe(config) -> DecoderSpec`; and `draft_head(config)`, if its checkpoints may have a head that
drafts tokens. Modules called `.._assistant` have `assistant(config, target) -> AssistantSpec`. A family imports no
other one: what several share is in `parts`. `forebay.families` has the rest of a family: its configuration and its
GGUF names.
"""
