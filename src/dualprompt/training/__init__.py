"""The training loop, the evaluator, and runs that belong together."""
