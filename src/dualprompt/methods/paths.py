"""RPSNet's network: layers of parallel modules, of which those that a path has taken are there and are added up."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from itertools import pairwise
from operator import add
from typing import Self

import torch
from torch import Tensor, nn

from dualprompt.backbones.base import Backbone, laid_out

LAYERS = 9
WIDTHS = (1, 1, 1, 2, 2, 4, 4, 8, 8)  # of what leaves each layer, in multiples of the first one's
PLAIN = (0, 6)  # layers without a shortcut
WIDER = (3, 5, 7)  # whose shortcut is a convolution that all modules share; that of the others is the identity
POOLED = (4, 6)  # halved after these


class Part(nn.Sequential):
    """A module or a shortcut. A frozen one stays in evaluation mode, so its BatchNorms' statistics never move."""

    frozen = False
    drifts = False  # whether statistics move all the same

    def __init__(self, *channels: int, last_relu: bool) -> None:
        parts: list[nn.Module] = []
        for inputs, outputs in pairwise(channels):
            parts += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
        super().__init__(*(parts if last_relu else parts[:-1]))

    def freeze(self, frozen: bool) -> None:
        """Freeze it, or let it train."""
        self.frozen = frozen
        self.requires_grad_(not frozen)

    def train(self, mode: bool = True) -> Self:
        """Go to training mode, unless it is frozen."""
        return super().train(mode and (self.drifts or not self.frozen))


class PathNetwork(Backbone):
    """Nine layers of up to `most` modules each. A layer gives relu(Σ modules(x) + shortcut(x)).

    A module comes into being when a path first takes it; `birth` says in which generation that was, −1 if none did.
    """

    birth: Tensor

    def __init__(self, width: int, most: int, side: int) -> None:
        super().__init__()
        self.width, self.most, self.side = width, most, side
        self.layers = nn.ModuleList(nn.ModuleDict() for _ in range(LAYERS))
        self.shortcuts = nn.ModuleDict({str(layer): Part(*self._channels(layer), last_relu=True) for layer in WIDER})
        self.register_buffer("birth", torch.full((LAYERS, most), -1))

    def _channels(self, layer: int) -> tuple[int, int]:
        return (self.width * WIDTHS[layer - 1] if layer else 3), self.width * WIDTHS[layer]

    @property
    def dim(self) -> int:
        """Channels that leave the last layer."""
        return self.width * WIDTHS[-1]

    @property
    def input_size(self) -> int:
        """Pixels a side."""
        return self.side

    @property
    def operations(self) -> float:
        """Two for each weight of a layer and pixel that leaves it, of the modules that are there."""
        total, side = 0.0, self.side
        for number, layer in enumerate(self.layers):
            total += 2 * side**2 * sum(parameter.numel() for parameter in layer.parameters())
            side //= 2 if number in POOLED else 1
        return total

    def at(self, layer: int) -> nn.ModuleDict:
        """Return the modules of a layer."""
        found = self.layers[layer]
        assert isinstance(found, nn.ModuleDict)
        return found

    def take(self, path: Tensor, generation: int, generator: torch.Generator | None = None) -> None:
        """Let a module of each layer be part of the network; those that are not there yet are made."""
        for layer, module in enumerate(path.tolist()):
            if str(module) not in self.at(layer):
                self._make(layer, module, generator)
                self.birth[layer, module] = generation

    def _make(self, layer: int, module: int, generator: torch.Generator | None) -> None:
        inputs, outputs = self._channels(layer)
        made = Part(inputs, outputs, last_relu=True) if not layer else Part(inputs, outputs, outputs, last_relu=False)
        if generator is not None:
            draw(made, generator)
        self.at(layer)[str(module)] = made.to(self.device)

    def train_generation(self, generation: int | None, drift: bool) -> None:
        """Train the modules of a generation and the shortcuts; None: nothing. With `drift`, statistics move anyway."""
        for layer in range(LAYERS):
            for module, part in self.at(layer).items():
                assert isinstance(part, Part)
                part.drifts = drift
                part.freeze(generation is None or int(self.birth[layer, int(module)]) != generation)
        for part in self.shortcuts.values():
            assert isinstance(part, Part)
            part.freeze(generation is None)
        self.train(self.training)

    def features(self, images: Tensor) -> Tensor:
        """Return the mean over pixels of what leaves the last layer, (batch, dim)."""
        x = laid_out(images)
        for layer in range(LAYERS):
            parts = self.at(layer)
            out = reduce(add, (parts[module](x) for module in sorted(parts, key=int)))  # in one order, to the last bit
            if layer in WIDER:
                out = out + self.shortcuts[str(layer)](x)
            elif layer not in PLAIN:
                out = out + x
            x = out.relu()
            if layer in POOLED:
                x = nn.functional.max_pool2d(x, 2)
        return x.mean(dim=(2, 3))

    def rounded(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the convolutions' weights and biases: BatchNorms stay in fp32."""
        convolutions = {name for name, module in self.named_modules() if isinstance(module, nn.Conv2d)}
        return ((name, p) for name, p in self.named_parameters() if name.rpartition(".")[0] in convolutions)

    def load(self, state: dict[str, Tensor]) -> None:
        """Take over a `state_dict()`, whatever modules it has."""
        self.birth.copy_(state["birth"])
        for layer, births in enumerate(state["birth"].tolist()):
            for module, birth in enumerate(births):
                there = str(module) in self.at(layer)
                if birth >= 0 and not there:
                    self._make(layer, module, None)
                elif birth < 0 and there:
                    del self.at(layer)[str(module)]
        self.load_state_dict(state)


@torch.no_grad()
def draw(part: nn.Module, generator: torch.Generator) -> None:
    """Draw convolutions from U(−1/√inputs, 1/√inputs), torch's own initialisation, but from the generator."""
    for module in part.modules():
        if isinstance(module, nn.Conv2d):
            bound = module.weight[0].numel() ** -0.5
            for parameter in (module.weight, module.bias):
                assert parameter is not None
                parameter.copy_((2 * torch.rand(parameter.shape, generator=generator) - 1) * bound)
