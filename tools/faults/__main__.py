"""The fault campaign: `python -m tools.faults [NAME …] [--out faults.json]`, in the repository's root. Its parts:

requests  malformed requests: from the OpenAPI schema (schemathesis), damaged and hostile images, multipart bodies, zips
          and bytes that are no HTTP (--requests).
kills     SIGKILL of runs of every method, at seeded moments (--kills): each is resumed, and must end in the same bits
          as one that nobody killed. SIGKILL of the server or of the process that learns (--server-kills): what the next
          server finds must be the old model or the new one, complete.
disk      files may only grow to a limit, as on a full disk.
folders   models and runs from a stranger, whose records and links point at other folders.
pictures  small files that decode to many pixels, from several clients (--rounds).
crowd     silent, half-said, stalled and deaf connections, also where few files may be open.
files     so many mutations (--files) of every kind of file that we read back.
soak      a server under a mixed load for --minutes; only if it is named.
loading   a model loaded so many times (--loads) in one process; only if it is named.

Everything is seeded and bounded. The summary is one JSON object; the exit code is 1 if there was a problem.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.faults.crowd import campaign_crowd
from tools.faults.disk import campaign_disk
from tools.faults.files import campaign_files
from tools.faults.folders import campaign_folders
from tools.faults.kills import campaign_runs, campaign_server
from tools.faults.loading import campaign_loading
from tools.faults.pictures import campaign_pictures
from tools.faults.requests import campaign_requests
from tools.faults.requests import problems as problems_of_requests
from tools.faults.soak import campaign_soak
from tools.faults.summary import publish

from dualprompt.bench.load import demo_model
from dualprompt.report.publication import check_target

NAMED = ("soak", "loading")  # parts that are carried out only where they are named
PARTS = ("requests", "kills", "disk", "folders", "pictures", "crowd", "files")


def main() -> int:
    """Run the campaign; return 1 if anything went wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "what", nargs="*", default=list(PARTS), help=f"{', '.join(PARTS)} (default: these), {', '.join(NAMED)}"
    )
    parser.add_argument("--files", type=int, default=2000, help="mutations of each kind of file")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=200, help="of runs, over all methods")
    parser.add_argument("--server-kills", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=5, help="requests of each of four clients with costly pictures")
    parser.add_argument("--minutes", type=float, default=60, help="of soak")
    parser.add_argument("--loads", type=int, default=100, help="of a model in one process")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, help="a saved model (default: a small one with the embedded backbone)")
    parser.add_argument("--out", type=Path, help="also write the summary here")
    parser.add_argument("--publish", type=Path, help="tables for the docs; parts that are there and not run now stay")
    options = parser.parse_args()
    check_target(options.publish)
    if strange := set(options.what) - {*PARTS, *NAMED}:
        parser.error(f"unknown part '{min(strange)}'; choose from {', '.join((*PARTS, *NAMED))}")
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        made: list[Path] = []

        def source() -> Path:
            if not made:
                made.append(options.model or demo_model(folder / "source"))
            return made[0]

        def kills() -> dict[str, Any]:
            runs = campaign_runs(folder, options.kills, options.seed) if options.kills else {"problems": []}
            none = {"problems": []}
            server = (
                campaign_server(source(), folder, options.server_kills, options.seed) if options.server_kills else none
            )
            return {"runs": runs, "server": server, "problems": runs["problems"] + server["problems"]}

        def requests() -> dict[str, Any]:
            asked = campaign_requests(source(), folder, options.requests, options.seed)
            return asked | {"problems": problems_of_requests(asked)}

        campaigns: dict[str, Callable[[], dict[str, Any]]] = {
            "files": lambda: campaign_files(options.files, options.seed),
            "requests": requests,
            "kills": kills,
            "disk": lambda: campaign_disk(source(), folder),
            "folders": lambda: campaign_folders(source(), folder),
            "pictures": lambda: campaign_pictures(source(), folder, options.rounds),
            "crowd": lambda: campaign_crowd(source(), folder),
            "loading": lambda: campaign_loading(source(), folder, options.loads),
            "soak": lambda: campaign_soak(source(), folder, options.minutes, options.out),
        }
        for name, campaign in campaigns.items():
            if name in options.what:
                found[name] = campaign()
                if options.out:
                    options.out.write_text(json.dumps(found, indent=2) + "\n")
                if options.publish:
                    publish(options.publish, {name: found[name]}, sys.argv[1:])
    sys.stdout.write(json.dumps(found, indent=2) + "\n")
    return 1 if any(part["problems"] for part in found.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
