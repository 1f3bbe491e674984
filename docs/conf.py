"""The documentation site; `make docs` builds it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

import sources

import labkit

project = "labkit"
author = "the labkit authors"
release = version = labkit.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "sources",
]
exclude_patterns = ["_build", "_ext"]
# Every name of labkit's own has to lead somewhere; libraries' names need the network.
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"(?!labkit\b).*"),
    (r"py:.*", r"labkit\.(theory|records\.COMPONENTS)"),
]

# ---- pages ----

nb_execution_mode = "off"  # the outputs are those that the notebooks were saved with
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
# A cell magic is no Python: what cannot be coloured is shown as it is.
suppress_warnings = ["misc.highlighting_failure", "mystnb.unknown_mime_type"]

highlight_language = "none"  # of what has no language: a shell, a drawing

# ---- the API, from docstrings ----

autodoc_preserve_defaults = True
autodoc_typehints = "none"  # the docstrings have the types
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
default_role = "py:obj"
napoleon_google_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False

# ---- what it looks like ----

html_theme = "pydata_sphinx_theme"
html_title = "labkit"
html_static_path = ["_static"]
html_css_files = ["labkit.css"]
html_show_copyright = False
html_show_sourcelink = False
copybutton_exclude = ".linenos, .gp, .go"
html_theme_options = {
    "logo": {"text": "labkit"},
    "navbar_align": "left",
    "header_links_before_dropdown": 6,
    "show_prev_next": True,
    "show_toc_level": 2,
    "footer_start": ["sphinx-version"],
    "footer_end": ["theme-version"],
    "pygments_light_style": "tango",
    "pygments_dark_style": "monokai",
}
html_sidebars = {"about/changelog": [], "index": [], "start": []}
if sources.REPOSITORY:
    html_theme_options["github_url"] = sources.REPOSITORY
