"""G-Prompts, E-Prompts and task keys, and how they are attached to a backbone."""
