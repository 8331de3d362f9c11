"""How Sphinx makes a site of these pages: `make docs`. What is generated stands in `scripts/site`."""

from forebay.base.package import __version__

project = "Forebay"
author = "the Forebay authors"
copyright = "the Forebay authors"
release = version = __version__

extensions = ["myst_parser"]
myst_heading_anchors = 4
smartquotes = False  # it makes one dash of the two before a flag
exclude_patterns = ["figures/*.md"]  # tables that stand in benchmarks.md
html_theme = "furo"
html_title = f"Forebay {__version__}"
html_static_path = ["site"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
# The pages open from the file system and ask no other host for anything: fonts are the reader's own.
html_theme_options = {
    "light_css_variables": {"font-stack": "system-ui, sans-serif", "color-brand-primary": "#0b6e6e",
                            "color-brand-content": "#0b6e6e"},
    "dark_css_variables": {"color-brand-primary": "#5cc8c8", "color-brand-content": "#5cc8c8"},
}  # fmt: skip
