"""The training values of a run as typed data, and the base of every config."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

LARGEST_BATCH = 2**20
Beta = Annotated[float, Field(ge=0, lt=1)]
Milestone = Annotated[int, Field(ge=1, le=10**6)]
Share = Annotated[float, Field(ge=0, le=1)]
Jitter = tuple[Share, Share, Share, Annotated[float, Field(ge=0, le=0.5)]]
Augment = Literal["none", "random_resized_crop", "pad_crop"]


class Strict(BaseModel):
    """Base of every config: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class TrainConfig(Strict):
    """The recipe: what the one training loop does for each task."""

    recipe: str = Field(default="custom", description="name of the recipe these values come from")
    epochs: int = Field(default=5, ge=1, le=10**6, description="passes over the images of a task")
    updates: int = Field(default=1, ge=1, le=1000, description="steps on each batch of an online stream")
    batch_size: int = Field(default=128, ge=1, le=LARGEST_BATCH, description="global batch, over all devices")
    lr: float = Field(default=0.005, gt=0, description="learning rate")
    lr_scale: Literal["none", "batch/256"] = Field(default="none", description="multiply lr by batch_size/256 or not")
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.999), description="β₁ and β₂ of adam")
    optimiser: Literal["adam", "sgd"] = Field(default="adam", description="made anew for every task")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="of sgd")
    nesterov: bool = Field(default=False, description="Nesterov's momentum, of sgd")
    schedule: Literal["constant", "cosine", "steps"] = Field(
        default="constant", description="cosine: down to 0 in each phase; steps: lr · gamma at each milestone"
    )
    milestones: tuple[Milestone, ...] = Field(
        default=(), max_length=1000, description="epochs of a phase after which `schedule: steps` lowers the rate"
    )
    gamma: float = Field(default=0.1, gt=0, le=1, description="what `schedule: steps` multiplies the rate by")
    warmup_epochs: int = Field(
        default=0,
        ge=0,
        le=10**6,
        description="epochs of a phase in which the rate rises from 0; then the schedule begins",
    )
    weight_decay: float = Field(default=0.0, ge=0, description="how strongly weights are pulled to 0")
    decay: Literal["decoupled", "l2"] = Field(
        default="decoupled", description="decoupled: as in AdamW; l2: added to Adam's gradient, as always to sgd's"
    )
    clip: float | None = Field(default=None, gt=0, description="largest global gradient norm")
    augment: Augment = Field(
        default="none", description="pad_crop: shifted by up to an eighth of the side, black beyond, and mirrored"
    )
    rotation: float = Field(default=0.0, ge=0, le=180, description="degrees that a training image is turned at most")
    jitter: Jitter = Field(
        default=(0.0, 0.0, 0.0, 0.0), description="most change of brightness, contrast, saturation and hue (0.5: any)"
    )
    query_view: Literal["augmented", "fixed"] = Field(
        default="augmented",
        description="image that the key-training query sees: the augmented one, or the test view",
    )

    @model_validator(mode="after")
    def _consistent(self) -> TrainConfig:
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs train.momentum > 0")
        if list(self.milestones) != sorted(set(self.milestones)):
            raise ValueError("milestones are epochs in rising order, each once")
        if self.schedule == "steps" and not self.milestones:
            raise ValueError("schedule: steps needs train.milestones")
        return self
