"""DeepSeek-V3: latent attention, and experts in groups beside shared ones in all layers but the first."""
