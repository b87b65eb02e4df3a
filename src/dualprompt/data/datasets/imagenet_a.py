"""ImageNet-A: 7,500 photographs of 200 ImageNet classes that a ResNet-50 took for others, split by us."""

from __future__ import annotations

from dualprompt.data.datasets.imagenet_r import WordNetFolders
from dualprompt.data.sources import DATASETS, Remote

DATASETS.register("imagenet-a")(
    WordNetFolders(
        "imagenet-a",
        "ImageNet-A: 7,500 photographs of 200 ImageNet classes that are hard to tell, 0.7 GB",
        Remote(
            urls=("https://people.eecs.berkeley.edu/~hendrycks/imagenet-a.tar",),
            path="imagenet-a.tar",
            checksum="md5:c3e55429088dc681f30d81f4726b6595",
            size=687_552_512,
            unpack="imagenet-a",
        ),
    )
)
