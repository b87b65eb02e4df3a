"""The training loop, the evaluator, checkpoints and run directories."""
