"""The prompts themselves: a shared G-Prompt, an E-Prompt and a key for each task, and the matching of images."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dualprompt.backbones.base import Prompts
from dualprompt.derived import Deriving
from dualprompt.errors import DualPromptError
from dualprompt.prompts.attach import LengthCounts, PrefixAt, Prompting, attach, prompt_shape

Init = Literal["uniform", "wide"]


def cosine(query: Tensor, keys: Tensor) -> Tensor:
    """Return γ(q, k): (batch, tasks) cosine similarities of (batch, dim) queries and (tasks, dim) keys."""
    return F.normalize(query, dim=-1) @ F.normalize(keys, dim=-1).T


def match_loss(query: Tensor, key: Tensor) -> Tensor:
    """Return the mean over images of 1 − γ(q(x), k_t), which pulls the key towards its task's queries."""
    return 1 - cosine(query, key[None]).mean()


def mean_key(queries: Tensor) -> Tensor:
    """Return the key that minimises the match loss in closed form: the mean of the normalised queries."""
    return F.normalize(queries, dim=-1).mean(dim=0)


def vote(selected: Tensor) -> Tensor:
    """Give every image of the batch the task that most of them selected (the first of equals)."""
    return torch.bincount(selected).argmax().expand_as(selected)


def rows_at(pool: Tensor, picked: Tensor) -> Tensor:
    """Return `pool[picked]`, with a gradient that sums what is picked twice in one order: so runs can be repeated.

    The gradient of an index adds them up from several threads at once on a CPU, in the order in which these come.
    """
    return F.embedding(picked, pool.flatten(1)).unflatten(-1, pool.shape[1:])


def paper_count(g_layers: int, e_layers: int, g_length: int, e_length: int, dim: int, tasks: int) -> int:
    """Return the paper's number of prompt and key parameters, which counts `length` rows a layer for Pre-T too."""
    return dim * (g_layers * g_length + tasks * (e_layers * e_length + 1))


def layers_of(value: Any) -> Any:
    """Let a config name a single layer by its number, a range as `3-8`, and none by null."""
    if value is None:
        return ()
    if not isinstance(value, int | str | list | tuple):
        return value  # which is refused
    parts = value if isinstance(value, list | tuple) else [value]
    return tuple(layer for part in parts for layer in _range(part))


def _range(part: Any) -> Sequence[Any]:
    """Return the layers of `3-8`, or what is none, as it is."""
    if not isinstance(part, str) or not (ends := re.fullmatch(r"(\d{1,3})-(\d{1,3})", part)):
        return (part,)
    first, last = int(ends[1]), int(ends[2])
    if first > last:
        raise ValueError(f"the layers {part} run backwards: write {last}-{first}")
    return range(first, last + 1)


def check_layers(name: str, layers: Sequence[int], depth: int) -> None:
    """Refuse layer numbers that the backbone does not have."""
    for layer in layers:
        if not 1 <= layer <= depth:
            raise DualPromptError(f"{name} has layer {layer}; the backbone's layers are 1 to {depth}")
    if len(set(layers)) != len(layers):
        raise DualPromptError(f"{name} names a layer twice: {list(layers)}")


class PromptBank(Deriving):
    """G-Prompt, E-Prompts and task keys. It grows by one E-Prompt and one key a task, without bound."""

    def __init__(
        self,
        *,
        dim: int,
        g_layers: Sequence[int],
        e_layers: Sequence[int],
        g_length: int,
        e_length: int,
        prompting: Prompting = "pre-t",
        prefix_at: PrefixAt = "projected",
        length_counts: LengthCounts = "each",
        keys: bool = True,
    ) -> None:
        super().__init__()
        self.dim, self.has_keys = dim, keys
        self.g_layers, self.e_layers = tuple(g_layers), tuple(e_layers)
        self.prompting: Prompting = prompting
        self.prefix_at: PrefixAt = prefix_at
        self.g_shape = prompt_shape(len(self.g_layers), g_length, dim, prompting, length_counts)
        self.e_shape = prompt_shape(len(self.e_layers), e_length, dim, prompting, length_counts)
        self.g_prompt = nn.Parameter(torch.zeros(self.g_shape))
        self.e_prompt = nn.ParameterList()  # each (layers, parts, rows, dim)
        self.task_key = nn.ParameterList()  # each (dim,); none where tasks are matched by other means

    @property
    def tasks(self) -> int:
        """Number of tasks that have an E-Prompt."""
        return len(self.e_prompt)

    def begin(self, generator: torch.Generator, init: Init) -> None:
        """Draw the G-Prompt, before the first task."""
        self.g_prompt.data.copy_(draw(self.g_shape, generator, init))

    def grow(self, generator: torch.Generator, init: Init, from_previous: bool) -> None:
        """Add an E-Prompt and a key; everything older stops training, so that it stays bit-identical."""
        e_prompt, key = draw(self.e_shape, generator, init), draw((self.dim,), generator, init)
        if from_previous and self.tasks:
            e_prompt = self.e_prompt[-1].detach().clone()
        self._append(e_prompt, key)

    def set_key(self, key: Tensor) -> None:
        """Replace the newest task's key."""
        self.task_key[-1].data.copy_(key)
        self.drop_derived()

    def restore(self, e_prompts: Sequence[Tensor], keys: Sequence[Tensor]) -> None:
        """Replace all E-Prompts and keys, for instance by those of a checkpoint."""
        self.e_prompt, self.task_key = nn.ParameterList(), nn.ParameterList()
        for e_prompt, key in zip(e_prompts, keys if self.has_keys else [torch.empty(0)] * len(e_prompts), strict=True):
            self._append(e_prompt.clone(), key.clone())

    def _append(self, e_prompt: Tensor, key: Tensor) -> None:
        if self.tasks:  # what is older was stopped when its successor came
            self.e_prompt[-1].requires_grad_(False)
        self.e_prompt.append(nn.Parameter(e_prompt.to(self.g_prompt.device)))
        if self.has_keys:
            if len(self.task_key):
                self.task_key[-1].requires_grad_(False)
            self.task_key.append(nn.Parameter(key.to(self.g_prompt.device)))
        self.drop_derived()

    def training_prompts(self) -> Prompts:
        """Return what the layers receive while the newest task is learned."""
        return self._attach(self.e_prompt[-1][None])

    def prompts_for(self, selected: Tensor, dtype: torch.dtype = torch.float32) -> Prompts:
        """Return what the layers receive when image i uses the E-Prompt of task `selected[i]`, in that precision."""
        return self._attach(self._stack(dtype)[selected])

    def similarities(self, query: Tensor) -> Tensor:
        """Return γ(q(x), k_t) for every image and every learned task, (batch, tasks)."""
        return F.normalize(query, dim=-1) @ self.derived("keys", lambda: F.normalize(self.keys(), dim=-1)).T

    def shared_prompts(self, e_prompt: Tensor) -> Prompts:
        """Return what the layers receive when all images use one E-Prompt, (layers, parts, rows, dim)."""
        return self._attach(e_prompt[None])

    def keys(self) -> Tensor:
        """Return all task keys, (tasks, dim)."""
        return torch.stack([*self.task_key]).detach() if self.has_keys else self.g_prompt.new_empty(0, self.dim)

    @torch.no_grad()
    def _stack(self, dtype: torch.dtype) -> Tensor:
        """Return all E-Prompts, (tasks, layers, parts, rows, dim).

        They are stacked and cast once a task, and the keys normalised, so that prediction costs the same for ten tasks
        as for a thousand.
        """
        return self.derived(dtype, lambda: torch.stack(list(self.e_prompt)).to(dtype))

    def _attach(self, e_prompt: Tensor) -> Prompts:
        """`e_prompt` is (batch or 1, layers, parts, rows, dim)."""
        g = {layer: self.g_prompt[i : i + 1] for i, layer in enumerate(self.g_layers)}
        e: Mapping[int, Tensor] = {layer: e_prompt[:, i] for i, layer in enumerate(self.e_layers)}
        return attach(g, e, self.prompting, self.prefix_at)


def draw(shape: tuple[int, ...], generator: torch.Generator, init: Init) -> Tensor:
    """Return the values with which prompts and keys begin."""
    values = torch.rand(shape, generator=generator)
    return values * 0.01 if init == "uniform" else values * 2 - 1
