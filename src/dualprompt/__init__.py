"""dualprompt: one frozen Vision Transformer learns task after task by training a few prompts."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dualprompt.data.memory import dataset_of
    from dualprompt.learner import ContinualLearner
    from dualprompt.research import fit, load_run

__all__ = ["ContinualLearner", "__version__", "dataset_of", "fit", "load_run"]
__version__ = "0.2.0"
_PLACES = {
    "ContinualLearner": "dualprompt.learner",
    "dataset_of": "dualprompt.data.memory",
    "fit": "dualprompt.research",
    "load_run": "dualprompt.research",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for, and PyTorch with it, when it is first asked for."""
    if name not in _PLACES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    """Return what there is, also what was not asked for yet."""
    return sorted({*globals(), *__all__})
