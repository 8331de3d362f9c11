"""From a body to its answer: what the engine is asked, what it generated, and how that goes out."""
