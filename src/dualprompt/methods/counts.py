"""How large a method is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Parameters:
    """How many numbers a method trained, with and without the classifier that all have, and what else it keeps."""

    trained: int
    additional: int
    backbone: int
    kept: int = 0  # statistics of old tasks and the like
    kept_bytes: int = 0

    def report(self) -> dict[str, Any]:
        """Return counts, megabytes (fp32, 10^6 bytes) and shares of the backbone."""

        def row(count: int) -> dict[str, Any]:
            return {"count": count, "mb": count * 4 / 1e6, "percent_of_backbone": 100 * count / self.backbone}

        total = row(self.trained)
        return {
            "trained": total["count"],
            "mb": total["mb"],
            "percent_of_backbone": total["percent_of_backbone"],
            "backbone": self.backbone,
            "additional": row(self.additional),
            "kept": {"count": self.kept, "mb": self.kept_bytes / 1e6},
        }
