"""GLM 4.5, 4.6 and 4.7: half of each head rotated, experts in groups beside a shared one behind the first layers."""
