"""dualprompt: one frozen Vision Transformer learns task after task by training a few prompts."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dualprompt.learner import ContinualLearner
    from dualprompt.research import fit, load_run

__all__ = ["ContinualLearner", "__version__", "fit", "load_run"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import what is asked for, and PyTorch with it, when it is first asked for."""
    if name == "ContinualLearner":
        from dualprompt.learner import ContinualLearner

        return ContinualLearner
    if name in ("fit", "load_run"):
        from dualprompt import research

        return getattr(research, name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
