"""Pack the pictures of the benchmark `mini` into the package: the same bytes from the same pictures.

    python tools/pack_mini.py PICTURES

PICTURES holds DOMAIN/SPLIT/CLASS/NUMBER.png or .jpg. Its files go into src/dualprompt/assets/mini.zip as they are,
uncompressed. The SHA-256 that is printed belongs into data/datasets/mini.py.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import zipfile
from pathlib import Path

ASSETS = Path(__file__).parents[1] / "src" / "dualprompt" / "assets"
COUNTS = {"train": 40, "test": 20}
# In the order that classes are numbered in.
CLASSES = {
    "clothes": "t-shirt trousers pullover dress coat sandal shirt sneaker bag ankle-boot",
    "digits": "zero one two three four five six seven eight nine",
    "fruit": "apple-braeburn apple-golden apple-granny-smith apple-pink-lady nectarine orange peach pear pear-forelle "
    "plum",
    "leaves": "apple-cedar-rust apple-healthy apple-scab cherry-powdery-mildew grape-black-rot grape-esca "
    "peach-bacterial-spot potato-early-blight strawberry-leaf-scorch tomato-yellow-leaf-curl",
    "scripts": "balinese early-aramaic greek japanese-katakana korean latin sanskrit tagalog",
}


def members(pictures: Path) -> list[tuple[str, Path]]:
    """Return every member's name and file, in the order that they are packed in."""
    found = []
    for domain, classes in CLASSES.items():
        for split, count in COUNTS.items():
            for label in classes.split():
                folder = pictures / domain / split / label
                files = sorted(folder.glob("*.*"))
                if len(files) != count:
                    raise SystemExit(f"{folder} holds {len(files)} pictures, {count} are expected")
                found += [(file.relative_to(pictures).as_posix(), file) for file in files]
    return found


def pack(pictures: Path, path: Path) -> str:
    """Write the zip file and return its SHA-256."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, file in members(pictures):
            member = zipfile.ZipInfo(name)  # dated 1980, so that the bytes do not depend on when it is made
            member.create_system, member.external_attr = 3, 0o644 << 16
            archive.writestr(member, file.read_bytes())
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> None:
    """Read the command line and pack."""
    parser = argparse.ArgumentParser(description="Pack the pictures of the benchmark mini into the package.")
    parser.add_argument("pictures", type=Path)
    parser.add_argument("--out", type=Path, default=ASSETS / "mini.zip")
    options = parser.parse_args()
    found = pack(options.pictures, options.out)
    sys.stdout.write(f"{options.out}: {options.out.stat().st_size:,} bytes, SHA-256 {found}\n")


if __name__ == "__main__":
    main()
