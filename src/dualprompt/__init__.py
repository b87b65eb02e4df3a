"""dualprompt: one frozen Vision Transformer learns task after task by training a few prompts."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dualprompt.learner import ContinualLearner

__all__ = ["ContinualLearner", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import the learner, and PyTorch with it, when it is first asked for."""
    if name == "ContinualLearner":
        from dualprompt.learner import ContinualLearner

        return ContinualLearner
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
