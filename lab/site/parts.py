"""Write parts of pages in HTML, from templates, in each language."""

import json
from collections.abc import Callable
from pathlib import Path

import jinja2


def words_of(folder: Path, language: str) -> dict[str, str]:
    """Return the translations in a folder of templates by their English texts; none for English."""
    if language == "en":
        return {}
    return json.loads((folder / f"{language}.json").read_text())


def part_of_page(
    template: Path, language: str, values: dict, pages: str = "", root: str = ""
) -> str:
    """Return a part of a page in a language, from a template beside its translations.

    Parameters
    ----------
    template : pathlib.Path
        A template of Jinja, in which ``_("a text", value)`` stands for the text in the language.
    language : str
        "en" or "zh-CN".
    values : dict
        What else the template names.
    pages, root : str
        What leads from the page to the first folder of its language, and to the site's.
    """
    words = words_of(template.parent, language)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(template.parent), undefined=jinja2.StrictUndefined
    )
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False}
    own = {"_": translator(words, language), "words": words, "pages": pages, "root": root}
    return environment.get_template(template.name).render(own | values)


def translator(words: dict[str, str], language: str) -> Callable[..., str]:
    """Return a function that translates a text and puts values into it."""

    def translate(text: str, *values) -> str:
        return (text if language == "en" else words[text]).format(*values)

    return translate
