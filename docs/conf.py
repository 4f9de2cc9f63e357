"""How Sphinx builds the site: from ``build/site/source``, where ``python -m tools.build_site`` lays the pages out."""

import os
import posixpath
import re
from pathlib import Path

from docutils import nodes
from sphinx.locale import _ as translate
from sphinx.search.en import SearchEnglish

from tools import publish
from tools.translations import LANGUAGE as TRANSLATION

ROOT = Path(os.environ["COURSE_ROOT"])
LANGUAGE = os.environ["COURSE_LANGUAGE"]
PLACE = os.environ["COURSE_PLACE"]  # what the site's first folder is called in links between the languages
OTHER = TRANSLATION if LANGUAGE == "en" else "en"
FOLDERS = {"en": "", TRANSLATION: f"{TRANSLATION}/"}  # of the site
SOURCES = {"en": "source", TRANSLATION: f"source-{TRANSLATION}"}
WORDS = {
    "en": {
        "name": "English",
        "title": "Stable Diffusion in JAX",
        "elsewhere": "This chapter elsewhere",
        "download": "Download .ipynb",
        "open in": "Open in",
        "search": "Search the docs ...",
        "more": "More",
        "theme": {},
    },
    TRANSLATION: {
        "name": "中文",
        "title": "用 JAX 运行 Stable Diffusion",
        "elsewhere": "在别处打开本章",
        "download": "下载 .ipynb",
        "open in": "前往",
        "search": "搜索……",
        "more": "更多",
        # What the theme has not translated itself.
        "theme": {
            "Collapse Sidebar": "收起侧栏",
            "Expand Sidebar": "展开侧栏",
            "Color mode": "颜色模式",
            "System Settings": "跟随系统",
        },
    },
}
REPOSITORY = publish.stamped_repository()
PUBLISHED = not REPOSITORY.startswith("OWNER/")

project = WORDS["en"]["title"]
author = "the course's authors"
project_copyright = "2026, the course's authors. Apache License 2.0"
language = LANGUAGE.replace("-", "_")

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

if LANGUAGE == "en":  # in which the reference is
    import jax

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
html_title = WORDS[LANGUAGE]["title"]
html_favicon = "_static/favicon.svg"
html_context = {"default_mode": "auto", "words": WORDS[LANGUAGE]}
html_static_path = ["_static"]
html_css_files = ["course.css"]
html_extra_path = ["../downloads"] if LANGUAGE == "en" else []  # which has those of all languages
html_copy_source = False
html_show_sourcelink = False
html_sidebars = {"docs/teach": []}  # it has no pages below it
html_theme_options = {
    "show_nav_level": 2,
    "navbar_align": "left",
    "navbar_persistent": ["language-switch", "search-button-field"],
    "search_bar_text": WORDS[LANGUAGE]["search"],
    "header_dropdown_text": WORDS[LANGUAGE]["more"],
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
        launched = publish.launch_links(REPOSITORY, f"{FOLDERS[LANGUAGE]}{name}")
        context["chapter_launch"] = launched if PUBLISHED else []


def add_language_switch(app, pagename, templatename, context, doctree):
    """Give a page the address of the same page in the other language; of the landing page where there is none."""
    source = Path(app.srcdir).with_name(SOURCES[OTHER])
    written = any((source / f"{pagename}{end}").exists() for end in (".md", ".ipynb"))
    there = written or pagename in ("search", "genindex")
    other = to_place(f"{FOLDERS[OTHER]}{pagename if there else 'index'}.html", pagename)
    context["switch"] = {"address": other, "language": OTHER, "name": WORDS[OTHER]["name"]}
    own = f"{posixpath.basename(pagename)}.html"
    context["_"] = lambda text: WORDS[LANGUAGE]["theme"].get(text) or translate(text)
    context["alternates"] = {LANGUAGE: own, OTHER: other} if there else {}


def to_place(path: str, docname: str) -> str:
    """What leads to a path of the site from a page."""
    return posixpath.relpath(path, posixpath.dirname(f"{FOLDERS[LANGUAGE]}{docname}") or ".")


def put_in_addresses(app, doctree, docname):
    """Links to what another project has: tools.build_site cannot know from where they will lead."""
    for node in doctree.findall(nodes.reference):
        if node.get("refuri", "").startswith(PLACE):
            node["refuri"] = to_place(node["refuri"].removeprefix(PLACE), docname)


class SearchChinese(SearchEnglish):
    """Chinese has no spaces, and a dictionary finds only its own words: take each sign, and each two in a row."""

    lang = "zh"
    js_splitter_code = """
function splitQuery(query) {
  const runs = query.match(/[\\u4e00-\\u9fff]+|(?:(?![\\u4e00-\\u9fff])[\\p{Letter}\\p{Number}_])+/gu) ?? [];
  const pairs = (run) => [...run].slice(1).map((sign, k) => run[k] + sign);
  return runs.flatMap((run) => (run.length > 2 && /[\\u4e00-\\u9fff]/.test(run) ? pairs(run) : [run]));
}
"""

    def split(self, text):
        runs = re.findall(r"[\u4e00-\u9fff]+|(?:(?![\u4e00-\u9fff])\w)+", text)
        chinese = [run for run in runs if re.match(r"[\u4e00-\u9fff]", run)]
        pairs = [run[k : k + n] for run in chinese for n in (1, 2) for k in range(len(run) - n + 1)]
        return [*pairs, *(run for run in runs if run not in chinese)]


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
    app.add_search_language(SearchChinese)
    app.connect("html-page-context", add_chapter_links)
    app.connect("html-page-context", add_language_switch)
    app.connect("doctree-resolved", put_in_addresses)
    app.connect("doctree-read", mark_times)
    app.connect("doctree-read", stack_wide_tables)
