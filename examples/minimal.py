"""DualPrompt in one file: no other code of this project, only torch, and Pillow to open pictures.

    python examples/minimal.py vit.safetensors photos/january photos/february

Each folder is a task and holds a folder of pictures for each class. The network learns one task after the other and
never sees an old picture again. A fifth of every class is kept aside; after each task the accuracy on these pictures
of all tasks so far is printed.

The paper (Wang et al., 2022) in its own words: a frozen Vision Transformer f. A G-Prompt g for all tasks, and for each
task t an E-Prompt e_t and a key k_t. Prefix Tuning puts g before the keys and values of attention in some layers, and
e_t in others. To learn task t, minimise

    L( f_φ( f(x; g, e_t) ), y )  +  λ (1 − cos( q(x), k_t ))        q(x) = f(x), without prompts

over g, e_t, k_t and the rows φ of task t. A test image takes the E-Prompt of the key that is nearest to its q(x).
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Prefixes = dict[int, Tensor]  # of each layer, counted from 1: (batch, 2, length, dim), for keys and for values


class Attention(nn.Module):
    """Multi-head self-attention; a prefix stands before its keys and values (Prefix Tuning)."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, prefix: Tensor | None) -> Tensor:
        """Attend from every token to the prefix and all tokens."""
        q, k, v = self.qkv(x).chunk(3, dim=-1)  # each (batch, tokens, dim)
        if prefix is not None:
            k = torch.cat([prefix[:, 0], k], dim=1)
            v = torch.cat([prefix[:, 1], v], dim=1)
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (q, k, v))
        weights = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(dim=-1)  # (batch, heads, tokens, +length)
        return self.proj((weights @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A layer of the transformer."""

    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(dim, hidden), "fc2": nn.Linear(hidden, dim)})

    def forward(self, x: Tensor, prefix: Tensor | None) -> Tensor:
        """Apply attention and the feed-forward half, each around a residual."""
        x = x + self.attn(self.norm1(x), prefix)
        return x + self.mlp["fc2"](F.gelu(self.mlp["fc1"](self.norm2(x))))


class ViT(nn.Module):
    """A Vision Transformer with timm's names, so that its weights fit; images to the class token's feature."""

    def __init__(self, size: int, patch: int, dim: int, depth: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.size, self.dim = size, dim
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, dim, patch, patch)})
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + (size // patch) ** 2, dim))
        self.blocks = nn.ModuleList(Block(dim, heads, hidden) for _ in range(depth))
        self.norm = nn.LayerNorm(dim, eps=1e-6)

    def forward(self, images: Tensor, prefixes: Prefixes | None = None) -> Tensor:
        """Return the class token's feature, (batch, dim)."""
        patches = self.patch_embed["proj"](images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(images), -1, -1), patches], dim=1) + self.pos_embed
        for number, block in enumerate(self.blocks, start=1):
            x = block(x, (prefixes or {}).get(number))
        return self.norm(x)[:, 0]


def read_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a safetensors file, and what its header says about them."""
    data = bytearray(path.read_bytes())
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    facts = header.pop("__metadata__", {})
    kinds = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
    tensors = {}
    for name, entry in header.items():
        first, last = (8 + length + at for at in entry["data_offsets"])
        tensor = torch.frombuffer(data[first:last], dtype=kinds[entry["dtype"]])
        tensors[name] = tensor.reshape(entry["shape"]).float()
    return tensors, facts


def load_vit(path: Path) -> tuple[ViT, dict[str, str]]:
    """Return the frozen network of a weights file, and the header, which has mean and std of its pixels."""
    tensors, facts = read_weights(path)
    dim, _, patch, _ = tensors["patch_embed.proj.weight"].shape
    depth = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("blocks."))
    hidden = len(tensors["blocks.0.mlp.fc1.bias"])
    vit = ViT(int(facts["input_size"]), patch, dim, depth, int(facts["num_heads"]), hidden)
    vit.load_state_dict({name: tensor for name, tensor in tensors.items() if not name.startswith("head.")})
    return vit.requires_grad_(False), facts


class DualPrompt(nn.Module):
    """A frozen ViT, a G-Prompt, and for each task an E-Prompt, a key and rows of a linear classifier."""

    def __init__(
        self,
        vit: ViT,
        seed: int = 0,
        g_layers: tuple[int, ...] = (1, 2),
        e_layers: tuple[int, ...] = (3, 4, 5),
        g_length: int = 5,
        e_length: int = 20,
        match_weight: float = 1.0,
    ) -> None:
        super().__init__()
        self.vit, self.seed, self.match_weight = vit, seed, match_weight
        self.g_layers, self.e_layers = g_layers, e_layers
        self.g_shape = len(g_layers), 2, g_length, vit.dim  # 2: for keys and for values
        self.e_shape = len(e_layers), 2, e_length, vit.dim
        self.g_prompt = nn.Parameter(torch.empty(self.g_shape))
        self.e_prompts, self.keys = nn.ParameterList(), nn.ParameterList()  # one a task
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()  # one block of rows a task

    def begin_task(self, classes: int) -> None:
        """Grow by a task; what the tasks before have of their own never changes again."""
        for old in (*self.e_prompts, *self.keys, *self.weights, *self.biases):
            old.requires_grad_(False)
        draws = generator(self.seed, "begin", len(self.keys))
        if not len(self.keys):
            self.g_prompt.data = 0.01 * torch.rand(self.g_shape, generator=draws)
        e_prompt = 0.01 * torch.rand(self.e_shape, generator=draws)
        key = 0.01 * torch.rand(self.vit.dim, generator=draws)
        # The new E-Prompt starts where the one before has ended.
        self.e_prompts.append(nn.Parameter(self.e_prompts[-1].detach().clone() if len(self.e_prompts) else e_prompt))
        self.keys.append(nn.Parameter(key))
        self.weights.append(nn.Parameter(torch.zeros(classes, self.vit.dim)))
        self.biases.append(nn.Parameter(torch.zeros(classes)))

    def prefixes(self, e_prompts: Tensor) -> Prefixes:
        """Return what each layer receives; `e_prompts` is (batch, layers, 2, length, dim)."""
        batch, found = len(e_prompts), {}
        for place, layer in enumerate(self.g_layers):
            found[layer] = self.g_prompt[place].expand(batch, -1, -1, -1)
        for place, layer in enumerate(self.e_layers):
            e_prompt = e_prompts[:, place]
            found[layer] = torch.cat([found[layer], e_prompt], dim=2) if layer in found else e_prompt
        return found

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of the newest task; labels count from its first class, and other logits are left out."""
        with torch.no_grad():
            query = self.vit(images)
        e_prompts = self.e_prompts[-1].expand(len(images), -1, -1, -1, -1)
        features = self.vit(images, self.prefixes(e_prompts))
        logits = F.linear(features, self.weights[-1], self.biases[-1])
        distance = 1 - F.cosine_similarity(query, self.keys[-1][None], dim=1).mean()
        return F.cross_entropy(logits, labels) + self.match_weight * distance

    @torch.no_grad()
    def predict(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of all classes so far, and the task whose E-Prompt each image took."""
        query = self.vit(images)
        keys = torch.stack(list(self.keys))
        task = F.cosine_similarity(query[:, None], keys[None], dim=2).argmax(dim=1)
        features = self.vit(images, self.prefixes(torch.stack(list(self.e_prompts))[task]))
        return F.linear(features, torch.cat(list(self.weights)), torch.cat(list(self.biases))), task


def generator(seed: int, *place: int | str) -> torch.Generator:
    """Return random numbers for one place of a run, such as the order of an epoch: unlike those of any other place."""
    text = "/".join([str(seed), *(f"{type(part).__name__}:{part}" for part in place)])
    return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1)


def learn(
    model: DualPrompt, images: Tensor, labels: Tensor, epochs: int = 5, batch: int = 16, lr: float = 0.005
) -> Iterator[float]:
    """Learn a task, whose labels count from 0; yield the mean loss of every epoch's batches."""
    model.begin_task(int(labels.max()) + 1)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser = torch.optim.Adam(trained, lr=lr)
    task = len(model.keys) - 1
    for epoch in range(epochs):
        order = torch.randperm(len(images), generator=generator(model.seed, "order", task, epoch))
        losses = []
        for rows in order.split(batch):
            loss = model.loss(images[rows], labels[rows])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
        yield sum(losses) / len(losses)


def read_folder(folder: Path, size: int, facts: dict[str, str]) -> tuple[Tensor, Tensor, list[str]]:
    """Return normalised images (count, 3, size, size), their labels from 0, and the names of the classes."""
    from PIL import Image

    mean, std = (torch.tensor([float(part) for part in facts[key].split(",")]) for key in ("mean", "std"))
    resampling = Image.Resampling.BICUBIC if facts.get("interpolation") == "bicubic" else Image.Resampling.BILINEAR
    names = sorted(each.name for each in folder.iterdir() if each.is_dir())
    images, labels = [], []
    for label, name in enumerate(names):
        for path in sorted((folder / name).iterdir()):
            picture = Image.open(path).convert("RGB").resize((size, size), resampling)
            pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).reshape(size, size, 3)
            images.append(((pixels / 255 - mean) / std).permute(2, 0, 1))
            labels.append(label)
    return torch.stack(images), torch.tensor(labels), names


def main() -> None:
    """Learn the folders one by one; after each, evaluate all."""
    parser = argparse.ArgumentParser(description="DualPrompt in one file")
    parser.add_argument("weights", type=Path, help="a ViT with timm's names, its header naming size, heads, mean, std")
    parser.add_argument("tasks", type=Path, nargs="+", help="folders of class folders, in the order of learning")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    vit, facts = load_vit(options.weights)
    model, kept, known = DualPrompt(vit, options.seed), [], 0
    for folder in options.tasks:
        images, labels, names = read_folder(folder, vit.size, facts)
        aside = torch.arange(len(images)) % 5 == 4
        for epoch, loss in enumerate(learn(model, images[~aside], labels[~aside], options.epochs), start=1):
            print(f"{folder.name}: epoch {epoch}, loss {loss:.3f}")
        kept.append((folder.name, images[aside], known + labels[aside], len(kept)))
        known += len(names)
        for name, pictures, truth, task in kept:
            found = [model.predict(part) for part in pictures.split(16)]
            right = torch.cat([logits.argmax(dim=1) for logits, _ in found]) == truth
            matched = torch.cat([taken for _, taken in found]) == task
            print(f"  {name}: {100 * right.float().mean():.1f} % right, {100 * matched.float().mean():.1f} % matched")


if __name__ == "__main__":
    main()
