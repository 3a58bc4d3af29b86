"""The settings of the site, which ``make docs`` builds from the Markdown pages and the docstrings.

The source folder is the root of the repository: README.md and its like, and the pages in benchmarks/, are on it, too.
"""

import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(Path(__file__).parent))
importlib.import_module("torch_stand_in").install()

project = "hpcdp"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "reference_pages",
]

root_doc = "docs/index"
include_patterns = ["*.md", "benchmarks/**.md", "docs/**.md"]
exclude_patterns = [path.name for path in ROOT.iterdir() if path.is_dir() and path.name not in ("benchmarks", "docs")]
suppress_warnings = ["toc.not_included"]  # notes in benchmarks/ are found by links; tests look at the indexes

html_theme = "furo"
html_title = "hpcdp"
html_copy_source = False
html_extra_path = ["redirect"]  # from the site's root to its first page
smartquotes = False  # which would change -- in options
myst_heading_anchors = 4  # as GitHub makes them
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True
copybutton_line_continuation_character = "\\"

default_role = "py:obj"  # of `names` in docstrings
add_module_names = False
python_use_unqualified_type_names = True
maximum_signature_line_length = 90
toc_object_entries_show_parents = "hide"
autosummary_generate = False
autodoc_default_options = {"special-members": "__call__, __getitem__, __iter__, __len__"}
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True  # as the source has them
autodoc_inherit_docstrings = False  # a layer's ``forward`` says nothing that `Module.forward` does not
napoleon_numpy_docstring = False
napoleon_use_rtype = False
