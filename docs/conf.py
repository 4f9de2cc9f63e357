"""How Sphinx builds the site from the pages that ``python -m lab.site.build_site`` lays out."""

import html
import itertools
import json
import os
import posixpath
import re
import shutil
import tomllib
from pathlib import Path
from urllib.parse import urljoin, urlsplit

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx import addnodes
from sphinx.environment.adapters.toctree import global_toctree_for_doc
from sphinx.locale import _ as translate
from sphinx.search.en import SearchEnglish

from lab.site import heads, quiz, set_repo
from lab.site.translations import LANGUAGE as TRANSLATION
from lab.site.translations import chinese_of, place_of

ROOT = Path(__file__).resolve().parents[1]
LANGUAGE = os.environ["COURSE_LANGUAGE"]
BUILDER = os.environ["COURSE_BUILDER"]
OTHER = TRANSLATION if LANGUAGE == "en" else "en"
FOLDERS = {"en": "", TRANSLATION: f"{TRANSLATION}/"}  # of the site
WORDS = {
    "en": {
        "name": "English",
        "title": "Stable Diffusion in JAX",
        "description": "Jupyter notebooks that run anywhere: Stable Diffusion and FLUX.2 in JAX.",
        "elsewhere": "This chapter elsewhere",
        "download": "Download .ipynb",
        "open in": "Open in",
        "search": "Search the docs ...",
        "more": "More",
        "moves": "What stands here on the site moves; the book has what can be printed of it.",
        "author": "the course's authors",
        "theme": {},
    },
    TRANSLATION: {
        "name": "中文",
        "title": "用 JAX 运行 Stable Diffusion",
        "description": "Jupyter notebook 课程：用 JAX 运行 Stable Diffusion 和 FLUX.2。",
        "elsewhere": "在别处打开本章",
        "download": "下载 .ipynb",
        "open in": "前往",
        "search": "搜索……",
        "more": "更多",
        "moves": "网站上的这一部分可以操作，书里只收录能印出来的内容。",
        "author": "课程作者",
        # What the theme has not translated itself.
        "theme": {
            "Breadcrumb": "当前位置",
            "Collapse Sidebar": "收起侧栏",
            "Expand Sidebar": "展开侧栏",
            "Color mode": "颜色模式",
            "System Settings": "跟随系统",
        },
    },
}
REPOSITORY = set_repo.stamped_repository()
PUBLISHED = not REPOSITORY.startswith("OWNER/")
ADDRESS = set_repo.site_address(REPOSITORY) if PUBLISHED else ""

project = WORDS["en"]["title"]
author = WORDS[LANGUAGE]["author"]
project_copyright = f"2026, {author}. Apache License 2.0"
language = LANGUAGE.replace("-", "_")
version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
templates_path = ["_templates"]
# A page includes the workshop's plans, and two pages files of the top level, which link to others.
exclude_patterns = ["docs/workshop", *(file.name for file in ROOT.glob("*.md"))]
nitpicky = True  # a reference that leads nowhere is a warning, and a warning stops the build
nitpick_ignore_regex = [
    # What docstrings say in words about types, and what other packages describe.
    (r"py:(class|obj)", r"optional|callable|dtype|float dtype|array|tree|sequence.*|str or None"),
    (r"py:(class|obj)", r"collection|re\.Pattern|course\.tpu\.records\.Exchange"),
    (r"py:(class|obj)", r"FlaxStableDiffusion.*|(pathlib\.)?Path"),
    (r"py:(class|obj)", r"(collections\.abc|contextlib|diffusers|jax|jaxlib|numpy|PIL)\..*"),
    (r"py:(class|obj)", r"(ray|tokenizers)\..*|iterable|pipeline"),
    # Pieces of types with commas in them.
    (r"py:(class|obj)", r"(dict|list|tuple)\[.*|.*\]"),
]

# The chapters come executed; nothing is executed here.
nb_execution_mode = "off"
nb_merge_streams = True
nb_render_markdown_format = "myst"  # which has tables
myst_enable_extensions = ["deflist", "attrs_block", "dollarmath"]
html_math_renderer = "mathml"
myst_heading_anchors = 3
# Some attributes are called as Python's own types are, such as ``bytes``.
suppress_warnings = ["myst.strikethrough", "ref.python", "epub.unknown_project_files"]

if LANGUAGE == "en":  # in which the reference is
    import jax

    jax.Array.__module__, jax.Array.__qualname__ = "jax", "Array"  # as signatures shall show it
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_google_docstring = False
napoleon_preprocess_types = True
# What docstrings call by a short name.
napoleon_type_aliases = {
    "Condition": "~course.sd.unet.Condition",
    "Config": "~course.sd.configs.Config",
    "ScheduleConfig": "~course.sd.configs.ScheduleConfig",
    "Tokenizer": "~course.sd.tokenizer.Tokenizer",
    "Scene": "~course.shapes.scenes.Scene",
    "Job": "~course.tpu.plan.Job",
    "Split": "~course.tpu.records.Split",
    "Way": "~course.tpu.splits.Way",
}
# And what the docstrings of course.flux2 call by the same names.
FLUX2_ALIASES = {
    "Config": "~course.flux2.configs.Config",
    "TransformerConfig": "~course.flux2.configs.TransformerConfig",
    "TextConfig": "~course.flux2.configs.TextConfig",
    "Tokenizer": "~course.flux2.tokenizer.Tokenizer",
}
html_theme = "pydata_sphinx_theme"
html_title = WORDS[LANGUAGE]["title"]
html_baseurl = ADDRESS + FOLDERS[LANGUAGE] if PUBLISHED else ""
html_favicon = "_static/favicon.svg"
html_context = {"default_mode": "auto", "words": WORDS[LANGUAGE]}
# The second is what a link to a page without pictures shows.
html_static_path = ["_static", "../checkpoints/shapes-sd/samples.png", "quiz/quiz.js"]
html_css_files = ["course.css"]
quiz_words = json.dumps(quiz.words_of_script(LANGUAGE), ensure_ascii=False)
html_js_files = [
    ("copy.js", {"defer": "defer"}),
    ("quiz.js", {"defer": "defer", "data-words": quiz_words}),
]
if LANGUAGE == TRANSLATION:
    html_js_files.append(("font.js", {"defer": "defer"}))
# The page that GitHub shows for addresses where there is none, in both languages.
html_additional_pages = {"404": "404.html"} if LANGUAGE == "en" else {}
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
if BUILDER == "singlehtml":  # the pages as they are printed
    html_theme = "epub"
    html_theme_options = {"relbar1": False, "footer": False}
    html_css_files = ["book.css"]
    html_js_files = []
    html_scaled_image_link = False
# The same pages as a book.
epub_title = html_title
epub_author = epub_contributor = epub_publisher = author
epub_description = WORDS[LANGUAGE]["description"]
epub_identifier = f"https://github.com/{REPOSITORY}"
epub_scheme = "URL"
epub_uid = "course"
epub_basename = "stable-diffusion-in-jax"
epub_css_files = []
NOT_IN_BOOK = "docs/progress"  # its table is of no use there
epub_exclude_files = [f"{NOT_IN_BOOK}.xhtml"]
epub_show_urls = "no"
epub_tocdup = False
epub_tocscope = "includehidden"  # the pages' lists of contents are hidden
epub_use_index = False


def add_chapter_links(app, pagename, templatename, context, doctree):
    """Give a chapter's page what its links above the text need."""
    if pagename.startswith("notebooks/"):
        name = pagename.removeprefix("notebooks/") + ".ipynb"
        context["chapter_file"] = name
        launched = set_repo.launch_links(REPOSITORY, f"{FOLDERS[LANGUAGE]}{name}")
        context["chapter_launch"] = launched if PUBLISHED else []


def add_language_switch(app, pagename, templatename, context, doctree):
    """Give a page the address of the same page in the other language, or of the landing page."""
    source = Path(app.srcdir).with_name(OTHER)
    written = any((source / f"{pagename}{end}").exists() for end in (".md", ".ipynb"))
    there = written or pagename in ("search", "genindex")
    other = to_place(f"{FOLDERS[OTHER]}{pagename if there else 'index'}.html", pagename)
    context["switch"] = {"address": other, "language": OTHER, "name": WORDS[OTHER]["name"]}
    context["_"] = lambda text: WORDS[LANGUAGE]["theme"].get(text) or translate(text)
    is_in_both = there and PUBLISHED
    context["alternates"] = heads.alternates(pagename, FOLDERS, ADDRESS) if is_in_both else {}


def describe_page(app, pagename, templatename, context, doctree):
    """Let a page's head say what it is about, and, on a published site, which picture it has."""
    words = WORDS[LANGUAGE]
    title = words["title"]
    if pagename in app.env.titles:
        title = app.env.titles[pagename].astext()
    about = (words["title"], words["description"], LANGUAGE)
    tags = heads.head_of(doctree, title, *about, html_baseurl, f"{pagename}.html")
    context["metatags"] = context.get("metatags", "") + heads.written(tags)
    if pagename == "404":  # it stands for any address, and its links count from the first page
        context["pageurl"] = None
        if PUBLISHED:
            base = f'<base href="{urlsplit(ADDRESS).path}" />'
            context["metatags"] = f"\n{base}{context['metatags']}"


def let_everybody_reach(app, pagename, templatename, context, doctree):
    """Let the keyboard reach tables that scroll, and give folded cells the name that is seen."""
    if "body" in context:
        body = context["body"].replace(' aria-label="Toggle hidden content"', "")
        table = '<div class="pst-scrollable-table-container"'
        context["body"] = body.replace(table, f'{table} tabindex="0"')


def fit_into_book(app, doctree, docname):
    """Leave out of the book what needs a browser, and let links out of it lead to the site.

    Of what moves, its still pictures stay.
    """
    for raw in list(doctree.findall(nodes.raw)):
        moves = "<script" in raw.astext()
        said = [nodes.paragraph("", WORDS[LANGUAGE]["moves"])] if moves else []
        raw.replace_self([*still_pictures(app, raw.astext(), docname), *said] if moves else [])
    for link in list(doctree.findall(nodes.reference)):
        address = link.get("refuri", "")
        path = posixpath.join(posixpath.dirname(docname), address)
        if posixpath.normpath(path) in app.config.epub_exclude_files:
            address = address.replace(".xhtml", ".html")
        if urlsplit(address).path.endswith(".html") and not urlsplit(address).scheme:
            if PUBLISHED:
                link["refuri"] = urljoin(f"{html_baseurl}{docname}.html", address)
            else:
                link.replace_self(link.children)


def bind(app, doctree, docname):
    """Lay the pages of the course one behind the other, for a PDF, each with ids of its own.

    Sphinx lays them where the lists of contents are, as parts of sections, and leads links to
    "#document-page#id".
    """
    pages = list(doctree.findall(addnodes.start_of_file))
    for page in pages:
        page.parent.remove(page)
    fit_into_book(app, doctree, docname)
    doctree.append(
        global_toctree_for_doc(
            app.env, docname, app.builder, tags=app.tags, collapse=False, titles_only=True
        )
    )
    for page in pages:
        name = page["docname"]
        if name == NOT_IN_BOOK:
            continue
        fit_into_book(app, page, name)
        for node in page.findall(nodes.Element):
            node["ids"] = [f"document-{name}#{each}" for each in node.get("ids", [])]
            if "refid" in node:
                node["refid"] = f"document-{name}#{node['refid']}"
        doctree.append(page)
    for link in list(doctree.findall(nodes.reference)):
        if link.get("refuri") == f"#document-{NOT_IN_BOOK}":
            link.replace_self(link.children)
    for link in list(doctree.findall(addnodes.download_reference)):
        link.replace_self(link.children)


def unfold(app, pagename, templatename, context, doctree):
    """Let nothing be folded on paper."""
    context["body"] = context["body"].replace("<details", "<details open")


def still_pictures(app, text, docname):
    """The pictures of a part of a page that a template wrote, each above what it shows in words."""
    page = posixpath.dirname(f"{FOLDERS[LANGUAGE]}{docname}")
    for address, alt in re.findall(r'<img src="([^"]+)"[^>]*?\balt="([^"]+)"', text):
        place = posixpath.normpath(posixpath.join(page, address))
        app.env.images.add_file(docname, place)
        yield nodes.image(uri=place, candidates={"*": place}, alt=html.unescape(alt))
        yield nodes.paragraph("", html.unescape(alt))


def load_lazily(app, doctree, docname):
    """Let pictures below a page's first one load only when the reader comes near them."""
    for image in list(doctree.findall(nodes.image))[1:]:
        image["loading"] = "lazy"


def to_place(path: str, docname: str) -> str:
    """What leads to a path of the site from a page."""
    return posixpath.relpath(path, posixpath.dirname(f"{FOLDERS[LANGUAGE]}{docname}") or ".")


def follow_links(app, doctree):
    """Let links between files of the repository lead to the pages that show them.

    Most links need no help, as pages lie here as they do there. The others lead to the README, for
    which the landing page stands, to a page in the other language, or to a file that is no page.
    """
    here = app.env.docname
    page = ROOT / ("docs/index" if here == "index" else here)
    folder = page.parent if LANGUAGE == "en" else chinese_of(page).parent
    for node in list(doctree.findall(addnodes.pending_xref)):
        path, _, anchor = node["reftarget"].partition("#")
        file = Path(os.path.normpath(folder / path))
        if node["reftype"] != "myst" or node["refdomain"] == "doc" or not file.is_file():
            continue  # where a link leads nowhere, MyST says so
        language, place = place_of(file)
        name = place.with_suffix("").as_posix()
        if language == LANGUAGE and name in app.env.found_docs:
            node["refdomain"] = "doc"
            node["reftarget"] = name
            node["reftargetid"] = anchor
        elif language != LANGUAGE and (Path(app.srcdir).with_name(language) / place).exists():
            address = to_place(f"{FOLDERS[language]}{name}.html", here)
            if anchor:
                address += f"#{anchor}"
            node.replace_self(nodes.reference("", "", *node.children, refuri=address))
        else:
            target = Path(app.srcdir) / place
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)
            link = addnodes.download_reference("", "", *node.children, reftarget=f"/{place}")
            node.replace_self(link)


def choose_aliases(app, what, name, obj, options, lines):
    """Let a docstring's short names be those of its own package, before napoleon reads it."""
    own = FLUX2_ALIASES if name.startswith("course.flux2.") else {}
    app.config.napoleon_type_aliases = napoleon_type_aliases | own


class SearchChinese(SearchEnglish):
    """Finds each Chinese sign, and each two in a row.

    Chinese has no spaces between words, and a dictionary finds only those that it has.
    """

    lang = "zh"
    js_splitter_code = """
function splitQuery(query) {
  const words = query.split(/([\\u4e00-\\u9fff]+)|[^\\p{Letter}\\p{Number}_]+/u).filter(Boolean);
  const pairs = (word) => [...word].slice(1).map((sign, k) => word[k] + sign);
  const isChinese = (word) => /[\\u4e00-\\u9fff]/.test(word);
  return words.flatMap((word) => (isChinese(word) && word.length > 2 ? pairs(word) : [word]));
}
"""

    def split(self, text):
        words = []
        for run in re.findall(r"[\u4e00-\u9fff]+|[^\W\u4e00-\u9fff]+", text):
            if re.match(r"[\u4e00-\u9fff]", run):
                words += run
                words += [first + second for first, second in itertools.pairwise(run)]
            else:
                words.append(run)
        return words


def mark_times(app, doctree):
    """Leave what differs from run to run out of the search: two builds have the same index."""
    for node in doctree.findall(nodes.Element):
        classes = node.get("classes", [])
        if "timing" in classes:  # a table; what a cell with this tag has is called tag_timing
            classes.append("tag_timing")
        if "tag_timing" in classes:
            classes.append("no-search")


def stack_wide_tables(app, doctree):
    """Mark tables whose cells are sentences: a phone shows the cells of a row below each other."""
    names = ("original-guides", "teach", "troubleshooting", "which-files")
    if app.env.docname.removeprefix("docs/") in names:
        for table in doctree.findall(nodes.table):
            table["classes"].append("stacked")


def write_math(translator, node):
    """Write a formula as MathML, which browsers show by themselves."""
    is_block = isinstance(node, nodes.math_block)
    formula = tex2mathml(node.astext(), as_block=is_block)
    translator.body.append(f"<p>{formula}</p>" if is_block else formula)
    raise nodes.SkipNode


def setup(app):
    app.add_html_math_renderer("mathml", (write_math, None), (write_math, None))
    app.add_search_language(SearchChinese)
    app.connect("autodoc-process-docstring", choose_aliases, priority=400)
    app.connect("doctree-read", follow_links, priority=400)  # before Sphinx collects downloads
    app.connect("doctree-read", mark_times)
    app.connect("doctree-read", stack_wide_tables)
    app.connect("builder-inited", connect_builder)


def connect_builder(app):
    """Let the site have what stands around a text and in its head, and the book the text alone."""
    if app.builder.name == "epub":
        app.config.html_additional_pages = {}
        app.connect("doctree-resolved", fit_into_book)
        return
    if app.builder.name == "singlehtml":
        app.config.html_additional_pages = {}
        app.connect("doctree-resolved", bind)
        app.connect("html-page-context", unfold)
        return
    # Before the theme looks which of its parts are empty.
    app.connect("html-page-context", add_chapter_links, priority=400)
    app.connect("html-page-context", add_language_switch, priority=400)
    app.connect("html-page-context", describe_page, priority=400)
    app.connect("html-page-context", let_everybody_reach)
    app.connect("doctree-resolved", load_lazily)
