"""A Sphinx extension: directives that read the reference from the code, and notebooks as pages."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from myst_parser.parsers.sphinx_ import MystParser
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from tools.site import commands, keys, notebooks


class Generated(SphinxDirective):
    """Puts Markdown that is made from the code into a page.

    ```{generated} config
    ```

    `config`, `methods`, `commands`, or `method NAME`.
    """

    required_arguments = 1
    optional_arguments = 1
    has_content = False

    def run(self) -> list[nodes.Node]:
        """Return what was asked for, as nodes."""
        makers = {"config": keys.run_config, "methods": keys.methods, "commands": commands.commands}
        what, *names = self.arguments
        if what == "method" and names:
            text = keys.method(names[0])
        elif what in makers and not names:
            text = makers[what]()
        else:
            raise self.error(f"generated: write one of {', '.join(makers)}, or method NAME; found {self.arguments}")
        return self.parse_text_to_nodes(text, allow_section_headings=True)


class NotebookParser(MystParser):
    """Reads a notebook with the outputs that it holds."""

    supported = ("notebook",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        """Parse it as the Markdown that it comes to."""
        super().parse(notebooks.markdown(inputstring), document)


def setup(app: Sphinx) -> dict[str, Any]:
    """Add all that to a build."""
    app.add_directive("generated", Generated)
    app.add_source_suffix(".ipynb", "notebook")
    app.add_source_parser(NotebookParser)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
