"""A run on disk: what was run, what happened, and everything needed to go on."""
