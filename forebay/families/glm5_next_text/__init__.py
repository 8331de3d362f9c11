"""GLM-5.3-Flash's language model: Kimi delta attention, sparse attention over pools, residual streams, experts."""
