"""The documentation site: `make docs` builds it into docs/_build/html, without a network."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tools.site

from dualprompt import __version__

project = "dualprompt"
author = "The dualprompt developers"
version = release = __version__
copyright = "The dualprompt developers"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "tools.site.extension",
]
exclude_patterns = ["_build", "experiments/*.json", "results/*.json"]

myst_enable_extensions = ["attrs_block", "colon_fence", "deflist"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"
default_role = "literal"  # docstrings are written with single backticks
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100

html_theme = "furo"
html_title = "dualprompt"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#3b5bdb", "color-brand-content": "#3b5bdb"},
    "dark_css_variables": {"color-brand-primary": "#91a7ff", "color-brand-content": "#91a7ff"},
}
pygments_style = "default"
pygments_dark_style = "github-dark"
