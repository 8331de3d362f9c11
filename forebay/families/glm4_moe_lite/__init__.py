"""GLM 4.7 Flash: DeepSeek-V3's latent attention and experts, in one group and in all layers but the first."""
