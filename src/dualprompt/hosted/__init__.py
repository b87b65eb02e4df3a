"""The model that a server holds: its engine, its lessons, each a process, pictures to look at (extra: serve)."""
