"""DeepSeek-V3.2: as V3, but each query reads the tokens alone that an indexer selects for it."""
