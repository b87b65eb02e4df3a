"""Runs notebooks in this process and keeps what their cells print, show and return; and turns them into Markdown.

    python -m tools.site.notebooks docs/notebooks/*.ipynb

Each runs in an empty folder of its own. No Jupyter is needed, here or where the site is built.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from dualprompt.files import write_text

Cell = dict[str, Any]


def run(notebook: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a notebook with new outputs: its code cells were run one after another, with `folder` around them."""
    names: dict[str, Any] = {"__name__": "__main__"}
    cells, number = [], 0
    with contextlib.chdir(folder):
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                number += 1
                cell = {**cell, "execution_count": number, "outputs": _outputs("".join(cell["source"]), names, number)}
            cells.append(cell)
    return {**notebook, "cells": cells}


def _outputs(source: str, names: dict[str, Any], number: int) -> list[Cell]:
    """Run a cell; return what it printed, and what its last line came to."""
    body = ast.parse(source).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(body, []), f"<cell {number}>", "exec"), names)
        value = None
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), f"<cell {number}>", "eval"), names)  # noqa: S307
    text = printed.getvalue()
    found = [{"output_type": "stream", "name": "stdout", "text": text.splitlines(keepends=True)}] if text else []
    if value is not None:
        result = {"output_type": "execute_result", "execution_count": number, "metadata": {}, "data": _data(value)}
        found.append(result)
    return found


def _data(value: Any) -> dict[str, Any]:
    """Return what Jupyter would show for a value: text, a table as HTML, a figure as PNG."""
    data: dict[str, Any] = {"text/plain": repr(value).splitlines(keepends=True)}
    if hasattr(value, "to_html"):
        data["text/html"] = value.to_html(border=0).splitlines(keepends=True)
    if hasattr(value, "savefig"):
        picture = io.BytesIO()
        value.savefig(picture, format="png", dpi=80, metadata={"Software": None})
        data["image/png"] = base64.b64encode(picture.getvalue()).decode()
        data["text/plain"] = [f"<{type(value).__name__}>"]
    return data


def kinds(notebook: dict[str, Any]) -> list[list[str]]:
    """Return which kinds of output each code cell has: `stdout`, or the types of what it returned."""
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return [[key for out in cell["outputs"] for key in out.get("data", {out.get("name"): 0})] for cell in cells]


def markdown(text: str) -> str:
    """Return a notebook, given as its JSON, as a page: prose, code, and below each cell what it gave."""
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        elif cell["cell_type"] == "code":
            parts.append(f"```python\n{source}\n```")
            parts += [_shown(output) for output in cell["outputs"]]
    return "\n\n".join(parts) + "\n"


def _shown(output: Cell) -> str:
    data = output.get("data", {"text/plain": output.get("text", [])})
    if "image/png" in data:
        return f"![{''.join(data['text/plain']).strip('<>')}](data:image/png;base64,{data['image/png'].strip()})"
    if "text/html" in data:
        return f'<div class="notebook-table">\n{"".join(data["text/html"])}\n</div>'
    return "```text\n" + "".join(data["text/plain"]).rstrip("\n") + "\n```"


def main() -> int:
    """Run the notebooks that are named, and write them back."""
    for name in sys.argv[1:]:
        path = Path(name).resolve()
        with tempfile.TemporaryDirectory() as folder:
            done = run(json.loads(path.read_text(encoding="utf-8")), Path(folder))
        write_text(path, json.dumps(done, indent=1, ensure_ascii=False) + "\n")
        sys.stdout.write(f"{os.path.relpath(path)}: {len(kinds(done))} cells\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
