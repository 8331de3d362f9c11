"""GLM-5: latent attention over tokens that an indexer selects, for one layer or several; experts."""
