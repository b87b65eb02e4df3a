"""The subcommands of `dualprompt`, by who uses them; each module adds its own to the parser."""
