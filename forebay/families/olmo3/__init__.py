"""OLMo 3: OLMo 2 with windows in three layers of four; only the rope of the other layers is scaled."""
