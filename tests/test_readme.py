"""The README in both languages: its badges open every chapter."""

import pytest

from tools.set_repo import ROOT, launch_links, stamped_repository

CHAPTERS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda chapter: chapter.stem)
@pytest.mark.parametrize("readme", ["README.md", "README.zh-CN.md"])
def test_each_chapter_opens_on_colab_and_kaggle(readme, chapter):
    text = (ROOT / readme).read_text()
    name = chapter.name
    if "zh-CN" in readme and (ROOT / "notebooks" / "zh-CN" / name).exists():
        name = f"zh-CN/{name}"
    addresses = dict(launch_links(stamped_repository(), name))
    for place in ("Colab", "Kaggle"):
        assert f"](docs/_static/{place.lower()}.svg)]({addresses[place]})" in text
