"""A Sphinx extension: a reference that is read from the code, notebooks as pages, and pages that nobody listed."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from myst_parser.parsers.sphinx_ import MystParser
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from tools.site import commands, keys, notebooks

OTHERS = "(other pages)"


class Generated(SphinxDirective):
    """Puts Markdown that is made from the code into a page.

    ```{generated} config
    ```

    `config`, `methods` or `commands`.
    """

    required_arguments = 1
    has_content = False

    def run(self) -> list[nodes.Node]:
        """Return what was asked for, as nodes."""
        makers = {"config": keys.run_config, "methods": keys.methods, "commands": commands.commands}
        make = makers.get(self.arguments[0])
        if make is None:
            raise self.error(f"generated: write one of {', '.join(makers)}; found {self.arguments[0]}")
        return self.parse_text_to_nodes(make(), allow_section_headings=True)


class NotebookParser(MystParser):
    """Reads a notebook with the outputs that it holds."""

    supported = ("notebook",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        """Parse it as the Markdown that it comes to."""
        super().parse(notebooks.markdown(inputstring), document)


def take_up(app: Sphinx, page: str, source: list[str]) -> None:
    """Put pages of the first level that the front page does not list where it says so, so that new ones are there."""
    if page == app.config.root_doc:
        listed = {page, *source[0].split()}
        others = sorted(name for name in app.env.found_docs if "/" not in name and name not in listed)
        source[0] = source[0].replace(OTHERS, "\n".join(others))


def setup(app: Sphinx) -> dict[str, Any]:
    """Add all that to a build."""
    app.connect("source-read", take_up)
    app.add_directive("generated", Generated)
    app.add_source_suffix(".ipynb", "notebook")
    app.add_source_parser(NotebookParser)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
