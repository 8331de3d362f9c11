"""Data that moves between components: a request, the batch of running ones, the plan of a step, and what came of it."""
