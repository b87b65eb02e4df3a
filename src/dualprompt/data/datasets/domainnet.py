"""DomainNet (cleaned version): 345 classes in six domains, with the official train and test lists."""

from __future__ import annotations

from pathlib import Path

from dualprompt.data.lists import number_of, pairs_of, split_of
from dualprompt.data.sources import DATASETS, Dataset, Reader, Remote, damaged

CLASSES = 345
SERVER = "http://csr.bu.edu/ftp/visda/2019/multi-source"


class DomainNet(Reader):
    """A domain: `domainnet/DOMAIN/CLASS/FILE`, and lists of "DOMAIN/CLASS/FILE label".

    The lists of paintings have no training image of a T-shirt, and no test image of a syringe.
    """

    licence = (
        "research only, as fair use; cite X. Peng et al., Moment Matching for Multi-Source Domain Adaptation, 2019"
    )
    seen = "has everyday things, many of which are classes of ImageNet"

    def __init__(
        self, domain: str, images: tuple[int, int], where: str, archive: tuple[str, int], *lists: tuple[str, int]
    ) -> None:
        self.domain, self.name, self.images = domain, f"domainnet/{domain}", images
        self.title = f"DomainNet, {domain}: {sum(images):,} pictures of 345 classes, {archive[1] / 1e9:.1f} GB"
        md5, size = archive
        file = f"{domain}.zip"
        self.remotes = (
            Remote((f"{SERVER}/{where}{file}",), f"domainnet/{file}", f"md5:{md5}", size, unpack=domain),
            *(
                Remote((f"{SERVER}/domainnet/txt/{file}",), f"domainnet/{file}", f"md5:{md5}", size)
                for file, (md5, size) in zip((f"{domain}_train.txt", f"{domain}_test.txt"), lists, strict=True)
            ),
        )

    def load(self, root: Path) -> Dataset:
        """List the files of both splits."""
        folder = root / "domainnet"
        names: dict[int, str] = {}
        lists = [self._files(folder / f"{self.domain}_{split}.txt", names) for split in ("train", "test")]
        if sorted(names) != list(range(CLASSES)):
            raise damaged(self.name, folder / f"{self.domain}_train.txt", f"speaks of {len(names)} classes")
        train, test = (split_of(self.name, folder, files) for files in lists)
        return Dataset(self.domain, tuple(names[label] for label in range(CLASSES)), train, test)

    def _files(self, path: Path, names: dict[int, str]) -> list[tuple[str, int]]:
        files = []
        for file, text in pairs_of(self.name, path):
            label, parts = number_of(self.name, path, text, CLASSES), file.split("/")
            if len(parts) != 3 or names.setdefault(label, parts[1]) != parts[1]:
                raise damaged(self.name, path, f"holds '{file[:80]}', which is no DOMAIN/CLASS/FILE of class {label}")
            files.append((file, label))
        return files


_CLEANED = "groundtruth/"
for _reader in (
    DomainNet(
        "clipart",
        (33_525, 14_604),
        _CLEANED,
        ("cd0d8f2d77a4e181449b78ed62bccf1e", 1_270_909_081),
        ("b4349693a7f9c05c53955725c47ed6cb", 1_443_819),
        ("f5ddbcfd657a3acf9d0f7da10db22565", 628_917),
    ),
    DomainNet(
        "infograph",
        (36_023, 15_582),
        "",
        ("720380b86f9e6ab4805bb38b6bd135f8", 4_338_659_804),
        ("379b50054f4ac2018dca4f89421b92d9", 1_683_098),
        ("779626b50869edffe8ea6941c3755c71", 728_028),
    ),
    DomainNet(
        "painting",
        (50_416, 21_850),
        _CLEANED,
        ("1ae32cdb4f98fe7ab5eb0a351768abfd", 3_679_366_174),
        ("7db0e7ca73ad9982f6e1f7f3ef372c0a", 2_241_901),
        ("232b35dc53f26d414686ae579e38d9b5", 971_888),
    ),
    DomainNet(
        "quickdraw",
        (120_750, 51_750),
        "",
        ("bdc1b6f09f277da1a263389efe0c7a66", 459_920_701),
        ("b732ced3939ac8efdd8c0a889dca56cc", 5_164_600),
        ("c1a828fdfe216fb109f1c0083a252c6f", 2_213_400),
    ),
    DomainNet(
        "real",
        (120_906, 52_041),
        "",
        ("dcc47055e8935767784b7162e7c7cca6", 6_062_039_589),
        ("8ebf02c2075fadd564705f0dc7cd6291", 4_440_944),
        ("6098816791c3ebed543c71ffa11b9054", 1_911_327),
    ),
    DomainNet(
        "sketch",
        (48_212, 20_916),
        "",
        ("658d8009644040ff7ce30bb2e820850f", 2_633_992_926),
        ("1233bd18aa9a8a200bf4cecf1c34ef3e", 1_960_222),
        ("d8a222e4672cfd585298aa14d02ea441", 850_581),
    ),
):
    DATASETS.register(_reader.name)(_reader)
