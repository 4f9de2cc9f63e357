"""Write what is not seen of the site's pages: descriptions, previews of links, and the sitemap.

Search engines read them, and programs that show what a link leads to.
"""

import html
import posixpath
import re
from pathlib import Path

from docutils import nodes
from sphinx import addnodes

LENGTH = 200  # of a description, in letters or signs; search engines show less
# What is no running text, or differs from run to run.
ASIDE = (
    addnodes.desc,
    nodes.Admonition,
    nodes.block_quote,
    nodes.container,
    nodes.definition_list,
    nodes.table,
)


def head_of(
    doctree, title: str, site: str, about: str, language: str, address: str, page: str
) -> dict[str, str]:
    """Return what a page says about itself, by the names that its readers look for.

    Parameters
    ----------
    doctree : docutils.nodes.document or None
        The page as Sphinx wrote it; None for one that Sphinx made up, such as the index.
    title : str
        The page's title.
    site, about : str
        The site's title, and its description, which a page without a text has as well.
    language : str
        "en" or "zh-CN".
    address, page : str
        Where the site is published in this language, and the page's place there. Without an address
        there is no picture, as programs fetch it from there.
    """
    description = description_of(doctree) if doctree is not None else ""
    tags = {
        "description": description or about,
        "og:type": "website",
        "og:site_name": site,
        "og:title": title,
        "og:description": description or about,
        "og:locale": language.replace("-", "_"),
    }
    if address:
        own = picture_of(doctree) if doctree is not None else None
        picture, alt = own or ("_static/samples.png", site)
        tags |= {
            "og:url": f"{address}{page}",
            "og:image": f"{address}{picture}",
            "og:image:alt": alt,
            "twitter:card": "summary_large_image",
        }
    return tags


def alternates(page: str, folders: dict[str, str], address: str) -> dict[str, str]:
    """Return where a page is in each language, as search engines read it: by whole addresses.

    English is for those whose language is none of these.

    >>> alternates("teach", {"en": "", "zh-CN": "zh-CN/"}, "https://me.io/")["zh-CN"]
    'https://me.io/zh-CN/teach.html'
    """
    places = {language: f"{address}{folder}{page}.html" for language, folder in folders.items()}
    return places | {"x-default": places["en"]}


def description_of(doctree) -> str:
    """Return how a page's text begins, with its lists and without tables, notes and outputs."""
    text = ""
    for paragraph in doctree.findall(nodes.paragraph):
        if not any(isinstance(node, ASIDE) for node in ancestors_of(paragraph)):
            text += f" {' '.join(paragraph.astext().split())}"
        if len(text) > LENGTH:
            break
    return shorten(text.strip())


def shorten(text: str) -> str:
    """Return a text of at most `LENGTH` signs, cut behind a word or a Chinese sign for a pause."""
    if len(text) <= LENGTH:
        return text
    cut = re.match(rf".{{1,{LENGTH - 2}}}(?<=[\s，。；：、！？])", text)
    return (cut.group() if cut else text[: LENGTH - 2]).rstrip(" ,;:，；：、") + " …"


def picture_of(doctree) -> tuple[str, str] | None:
    """Return the place of a written page's first picture and the text that stands for it, or None.

    Pictures that differ from run to run do not count, and neither do drawings (SVG).
    """
    for image in doctree.findall(nodes.image):
        timed = any("tag_timing" in node.get("classes", []) for node in ancestors_of(image))
        if not timed and not image["uri"].endswith(".svg"):
            return f"_images/{posixpath.basename(image['uri'])}", image.get("alt", "")
    return None


def ancestors_of(node):
    """The nodes in which a node of a page lies, from the inside out."""
    while node.parent is not None:
        node = node.parent
        yield node


def written(tags: dict[str, str]) -> str:
    """Return tags as HTML, each on a line of its own, the first of which is empty."""
    lines = [""]
    for name, content in tags.items():
        key = "property" if name.startswith("og:") else "name"
        lines.append(f'<meta {key}="{name}" content="{html.escape(content)}" />')
    return "\n".join(lines)


def sitemap(site: Path, address: str) -> str:
    """Return the text of sitemap.xml: the published addresses of a folder's pages.

    Those that Sphinx made up, such as the index, are left out.
    """
    lines = [
        '<?xml version="1.0" encoding="utf-8"?>',
        '<urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9">',
    ]
    made_up = {"404.html", "genindex.html", "py-modindex.html", "search.html"}
    for page in sorted(site.rglob("*.html")):
        path = page.relative_to(site)
        if path.name not in made_up and not any(part.startswith("_") for part in path.parts):
            lines.append(f"<url><loc>{html.escape(address + path.as_posix())}</loc></url>")
    return "\n".join([*lines, "</urlset>", ""])
