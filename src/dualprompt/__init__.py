"""dualprompt: one frozen Vision Transformer learns task after task by training a few prompts."""

__version__ = "0.1.0"
