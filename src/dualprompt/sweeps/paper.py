"""The numbers that the paper publishes, typed from its tables, to stand beside ours.

All are percentages, mean and standard deviation over the paper's runs, with ViT-B/16 pre-trained on ImageNet-21k.
"""

from __future__ import annotations

from typing import NamedTuple

from dualprompt.backbones.known import KNOWN

BACKBONE = "vit-b16-in21k"
BACKBONE_TITLE = "ViT-B/16, ImageNet-21k"


class Published(NamedTuple):
    """Average accuracy and forgetting of a method; the paper gives no forgetting for joint training and GDumb."""

    accuracy: float
    accuracy_std: float
    forgetting: float | None = None
    forgetting_std: float | None = None


Table = dict[int, dict[str, Published]]  # buffer size → method → numbers; 0 is for methods without rehearsal

# Table 1, left half.
SPLIT_CIFAR100: Table = {
    1000: {
        "er": Published(67.87, 0.57, 33.33, 1.28),
        "bic": Published(66.11, 1.76, 35.24, 1.64),
        "gdumb": Published(67.14, 0.37),
        "der++": Published(61.06, 0.87, 39.87, 0.99),
        "co2l": Published(72.15, 1.32, 28.55, 1.56),
    },
    5000: {
        "er": Published(82.53, 0.17, 16.46, 0.25),
        "bic": Published(81.42, 0.85, 17.31, 1.02),
        "gdumb": Published(81.67, 0.02),
        "der++": Published(83.94, 0.34, 14.55, 0.73),
        "co2l": Published(82.49, 0.89, 17.48, 1.80),
    },
    0: {
        "ft-seq": Published(33.61, 0.85, 86.87, 0.20),
        "ewc": Published(47.01, 0.29, 33.27, 1.17),
        "lwf": Published(60.69, 0.63, 27.77, 2.17),
        "l2p": Published(83.86, 0.28, 7.35, 0.38),
        "dualprompt": Published(86.51, 0.33, 5.16, 0.09),
        "upper-bound": Published(90.85, 0.12),
    },
}

# Table 1, right half.
SPLIT_IMAGENET_R: Table = {
    1000: {
        "er": Published(55.13, 1.29, 35.38, 0.52),
        "bic": Published(52.14, 1.08, 36.70, 1.05),
        "gdumb": Published(38.32, 0.55),
        "der++": Published(55.47, 1.31, 34.64, 1.50),
        "co2l": Published(53.45, 1.55, 37.30, 1.81),
    },
    5000: {
        "er": Published(65.18, 0.40, 23.31, 0.89),
        "bic": Published(64.63, 1.27, 22.25, 1.73),
        "gdumb": Published(65.90, 0.28),
        "der++": Published(66.73, 0.87, 20.67, 1.24),
        "co2l": Published(65.90, 0.14, 23.36, 0.71),
    },
    0: {
        "ft-seq": Published(28.87, 1.36, 63.80, 1.50),
        "ewc": Published(35.00, 0.43, 56.16, 0.88),
        "lwf": Published(38.54, 1.23, 52.37, 0.64),
        "l2p": Published(61.57, 0.66, 9.73, 0.47),
        "dualprompt": Published(68.13, 0.49, 4.68, 0.20),
        "upper-bound": Published(79.13, 0.18),
    },
}

# The appendix's table; it has no GDumb.
FIVE_DATASETS: Table = {
    250: {
        "er": Published(80.32, 0.55, 15.69, 0.89),
        "bic": Published(78.74, 1.41, 21.15, 1.00),
        "der++": Published(80.81, 0.07, 14.38, 0.35),
        "co2l": Published(82.25, 1.17, 17.52, 1.35),
    },
    500: {
        "er": Published(84.26, 0.84, 12.85, 0.62),
        "bic": Published(85.53, 2.06, 10.27, 1.32),
        "der++": Published(84.88, 0.57, 10.46, 1.02),
        "co2l": Published(86.05, 1.03, 12.28, 1.44),
    },
    0: {
        "ft-seq": Published(20.12, 0.42, 94.63, 0.68),
        "ewc": Published(50.93, 0.09, 34.94, 0.07),
        "lwf": Published(47.91, 0.33, 38.01, 0.28),
        "l2p": Published(81.14, 0.93, 4.64, 0.52),
        "dualprompt": Published(88.08, 0.36, 2.21, 0.69),
        "upper-bound": Published(93.93, 0.18),
    },
}

TABLES: dict[str, Table] = {
    "split-cifar100": SPLIT_CIFAR100,
    "split-imagenet-r": SPLIT_IMAGENET_R,
    "5-datasets": FIVE_DATASETS,
}


class Published2(NamedTuple):
    """A row of Table 2: what it says, and which accuracy that is; docs/methods/architecture-based.md says more."""

    accuracy: float
    accuracy_std: float | None = None
    diff: float | None = None
    buffer: int | None = None
    mb: float | None = None
    percent: float | None = None
    metric: str = "not said"  # last, mean over steps, or not said


_MEAN, _LAST = "mean over steps", "last"
# Table 2, on Split CIFAR-100: family of the backbone and method → row.
TABLE_2: dict[tuple[str, str], Published2] = {
    ("ResNet-18", "upper-bound"): Published2(80.41, metric=_MEAN),
    ("ResNet-18", "supsup"): Published2(28.34, 2.45, 52.07, 0, 3.0, 6.5),
    ("ResNet-18", "dualnet"): Published2(40.14, 1.64, 40.27, 1000, 5.04, 10.9),
    ("ResNet-18", "rpsnet"): Published2(68.60, None, 11.81, 2000, 181, 404, _MEAN),
    ("ResNet-18", "dynaer"): Published2(74.64, None, 5.77, 2000, 19.8, 43.8, _MEAN),
    ("ResNet-152", "upper-bound"): Published2(88.54),
    ("ResNet-152", "dynaer"): Published2(71.01, 0.58, 17.53, 2000, 159, 68.5),
    ("ViT", "upper-bound"): Published2(90.85, 0.12, metric=_LAST),
    ("ViT", "l2p"): Published2(83.86, 0.28, 6.99, 0, 1.94, 0.56, _LAST),
    ("ViT", "dualprompt"): Published2(86.51, 0.33, 4.34, 0, 1.90, 0.55, _LAST),
}
# DynaER's accuracy after each of ten steps on CIFAR-100, in its authors' log: without masks, in their class order.
DYNAER_STEPS = (87.6, 83.5, 80.8, 78.3, 75.7, 73.5, 72.1, 69.6, 67.3, 65.2)
GROUPS: dict[str, tuple[str, ...]] = {
    group: tuple(method for family, method in TABLE_2 if family == group) for group, _ in TABLE_2
}
ARCHITECTURES = ("supsup", "dualnet", "rpsnet", "dynaer")  # methods on ResNets, which Table 1 does not have

# Of the rows; the paper has no FT++, which stands beside FT-seq.
ORDER = ("er", "bic", "gdumb", "der++", "co2l", "ft-seq", "ft++", "ewc", "lwf", "l2p", "dualprompt")


def buffers(benchmark: str) -> list[int]:
    """Return the buffer sizes that the paper compares rehearsal methods at; none for a benchmark it does not have."""
    return sorted(size for size in TABLES.get(benchmark, {}) if size)


def is_its_backbone(name: str) -> bool:
    """Return whether a config's backbone is the paper's."""
    return name == BACKBONE or name.removeprefix("hf-hub:") == KNOWN[BACKBONE].source


# The search for where and how to attach prompts, and the ablation, are of Split ImageNet-R; layers count from 1.
SEARCHED_ON = "Split ImageNet-R"
SINGLE_E, SINGLE_G = 5, 2  # the best layer of an E-Prompt alone, then of a G-Prompt beside the best E-Prompts
E_LAYERS, G_LAYERS = (3, 4, 5), (1, 2)
E_LENGTH, G_LENGTH = 20, 5
LENGTHS = (5, 10, 20, 40)

# Validation accuracy of contiguous spans, first to last layer; the paper swaps the headers of these two tables.
E_SPANS = {
    (5, 5): 65.55, (3, 4): 65.76, (4, 5): 66.59, (5, 6): 66.12, (3, 5): 67.12, (4, 6): 66.41, (5, 7): 64.53,
    (1, 12): 67.09,
}  # fmt: skip
G_SPANS = {(2, 2): 67.70, (1, 2): 68.46, (1, 3): 67.79, (1, 5): 67.73, (6, 8): 65.10, (1, 12): 63.13}

# Table 3: accuracy and forgetting.
PROMPTING = {
    "split-cifar100": {"pro-t": (83.81, 5.94), "pre-t": (86.51, 5.16)},
    "split-imagenet-r": {"pro-t": (64.99, 6.81), "pre-t": (68.13, 4.68)},
}

# Table 4, on Split ImageNet-R: (G-Prompt, E-Prompt, multi-layer) → accuracy and forgetting.
ABLATION = {
    (False, False, False): (27.01, 7.57),
    (True, False, False): (63.41, 6.52),
    (False, True, False): (65.10, 5.52),
    (True, True, False): (66.77, 5.74),
    (True, False, True): (63.85, 7.50),
    (False, True, True): (66.91, 4.77),
    (True, True, True): (68.13, 4.68),
}

# The appendix's perfect match, on Split ImageNet-R: matching accuracy, accuracy and forgetting.
MATCHING = {"query": (55.8, 68.13, 4.68), "oracle": (100.0, 71.97, 3.95)}
