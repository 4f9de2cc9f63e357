"""How Sphinx builds the site: from ``build/site/source``, where ``python -m tools.build_site`` lays the pages out."""

import os
from pathlib import Path

import jax
from docutils import nodes

from tools import publish

ROOT = Path(os.environ["COURSE_ROOT"])
REPOSITORY = publish.stamped_repository()
PUBLISHED = not REPOSITORY.startswith("OWNER/")

project = "Stable Diffusion in JAX"
author = "the course's authors"
project_copyright = "2026, the course's authors. Apache License 2.0"
language = "en"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
templates_path = ["_templates"]
exclude_patterns = ["inventories", "docs/workshop"]
nitpicky = True  # a reference that leads nowhere is a warning, and a warning stops the build
nitpick_ignore_regex = [
    # What docstrings say in words about types.
    (r"py:(class|obj)", r"optional|callable|dtype|float dtype|array|tree|sequence.*|str or None|FlaxStableDiffusion.*"),
    (
        r"py:(class|obj)",
        r"(collections\.abc|contextlib|diffusers|PIL|numpy\.typing|jax\.stages|jax\._src\.stages)\..*|(pathlib\.)?Path",
    ),
]

# The chapters come executed; nothing is executed here.
nb_execution_mode = "off"
nb_merge_streams = True
nb_render_markdown_format = "myst"  # which has tables
myst_enable_extensions = ["deflist", "attrs_block"]
myst_heading_anchors = 3
suppress_warnings = ["myst.strikethrough"]

# Its page is under the public name, and Sphinx would look for it under the private one.
jax.Array.__module__, jax.Array.__qualname__ = "jax", "Array"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_google_docstring = False
napoleon_preprocess_types = True

# Written by ``python -m tools.inventories``, and kept, so that the build asks no network.
intersphinx_mapping = {
    "python": ("https://docs.python.org/3/", "inventories/python.inv"),
    "jax": ("https://docs.jax.dev/en/latest/", "inventories/jax.inv"),
    "flax": ("https://flax.readthedocs.io/en/latest/", "inventories/flax.inv"),
    "numpy": ("https://numpy.org/doc/stable/", "inventories/numpy.inv"),
}

html_theme = "pydata_sphinx_theme"
html_title = project
html_favicon = "_static/favicon.svg"
html_context = {"default_mode": "auto"}
html_static_path = ["_static"]
html_css_files = ["course.css"]
html_extra_path = ["../downloads"]
html_copy_source = False
html_show_sourcelink = False
html_sidebars = {"docs/teach": []}  # it has no pages below it
html_theme_options = {
    "show_nav_level": 2,
    "navbar_align": "left",
    "header_links_before_dropdown": 5,
    "article_header_end": ["chapter-links"],
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": ["theme-version"],
    "github_url": f"https://github.com/{REPOSITORY}" if PUBLISHED else "",
}


def add_chapter_links(app, pagename, templatename, context, doctree):
    """Give a chapter's page what its links above the text need."""
    if pagename.startswith("notebooks/"):
        name = pagename.removeprefix("notebooks/") + ".ipynb"
        context["chapter_file"] = name
        context["chapter_launch"] = publish.launch_links(REPOSITORY, name) if PUBLISHED else []


def mark_times(app, doctree):
    """Leave what differs from run to run out of the search: the index of two builds should be the same."""
    for node in doctree.findall(nodes.Element):
        classes = node.get("classes", [])
        if "timing" in classes:  # a table; the class of cells has a sign that Markdown would replace
            classes.append("tag_timing")
        if "tag_timing" in classes:
            classes.append("no-search")


def stack_wide_tables(app, doctree):
    """Mark the tables whose cells are sentences, so that a phone shows the cells of a row one below the other."""
    if app.env.docname in ("docs/troubleshooting", "docs/original-guides", "docs/teach"):
        for table in doctree.findall(nodes.table):
            table["classes"].append("stacked")


def setup(app):
    app.connect("html-page-context", add_chapter_links)
    app.connect("doctree-read", mark_times)
    app.connect("doctree-read", stack_wide_tables)
