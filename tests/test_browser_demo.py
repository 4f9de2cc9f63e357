"""The landing page draws what JAX draws, and says in a sentence what goes wrong."""

import json
import re

import jax
import numpy as np
import pytest
from playwright.sync_api import expect

from course import sd
from course.shapes import judge, scenes
from lab.site import browser_demo

# Caption, seed, steps, guidance scale. The checkpoint does not know the last caption's words.
REQUESTS = [
    ("a large red heart on a white background", 0, 20, 3.0),
    ("a small yellow star on a blue background", 7, 12, 3.0),
    ("a medium green ring on a black background", 42, 30, 4.0),
    ("a large purple moon on a pink background", 99, 15, 3.0),
    ("a large white cross on a red background", 3, 10, 5.0),
    ("Ein großes rotes Herz's, 3 mal!", 5, 8, 2.5),
]


@pytest.fixture
def page(open_page):
    page = open_page("index")
    expect(page.locator("#draw")).to_be_visible()
    return page


def ask(page, caption, seed=0, steps=4, guidance=3.0):
    page.locator("[name=caption]").fill(caption)
    for name, value in {"seed": seed, "steps": steps, "guidance": guidance}.items():
        page.locator(f"[name={name}]").fill(str(value))


def pixels(page):
    code = "c => [...c.getContext('2d').getImageData(0, 0, 64, 64).data]"
    return np.array(page.locator("#draw canvas").evaluate(code), np.float32).reshape(64, 64, 4)[
        ..., :3
    ]


def said(page):
    return page.locator("#draw-said")


def test_six_captions_are_drawn_as_jax_draws_them(page, screenshots):
    params, config, tokenize = sd.load(browser_demo.CHECKPOINT)
    in_jax = jax.jit(sd.generate, static_argnames=sd.STATIC)
    right = 0
    for caption, seed, steps, guidance in REQUESTS:
        ask(page, caption, seed, steps, guidance)
        page.locator("[name=caption]").press("Enter")
        expect(said(page)).to_contain_text("Drawn in", timeout=120_000)
        expect(page.locator("#draw canvas")).to_have_attribute("aria-label", caption)
        found = pixels(page)
        ids = tokenize([caption]), tokenize([""])
        expected = in_jax(params, config, ids[0], jax.random.key(seed), ids[1], steps, guidance)[0]
        assert np.abs(found - 255 * np.asarray(expected)).mean() <= 2, caption
        scene = judge.read_scene(found.astype(np.uint8))
        if not isinstance(scene, judge.Refusal):
            right += (
                scenes.caption(scene.size, scene.color, scene.shape, scene.background) == caption
            )
        page.evaluate("document.getElementById('draw-said').textContent = ''")
    assert right >= 4, "the judge reads what the captions say"
    page.screenshot(path=screenshots / "index-drawn.png")


def test_what_is_drawn_first_stands_there_from_the_start(page):
    canvas = page.locator("#draw canvas")
    expect(canvas).to_have_attribute("aria-label", REQUESTS[0][0])
    recorded = pixels(page)
    expect(said(page)).to_contain_text(re.compile(r"Draw loads \d+ MB the first time"))
    page.get_by_role("button", name="Draw").click()
    expect(said(page)).to_contain_text("Drawn in", timeout=120_000)
    assert np.abs(pixels(page) - recorded).mean() < 4, "but for what compressing changed"


def test_the_chinese_page_draws_and_speaks_chinese(open_page):
    page = open_page("zh-CN/index")
    expect(page.locator("#draw")).to_be_visible()
    ask(page, REQUESTS[0][0], steps=2)
    page.get_by_role("button", name="生成").click()
    expect(said(page)).to_contain_text("全部在你的浏览器里完成", timeout=120_000)
    page.locator("[name=caption]").fill("a red house")
    expect(page.locator("#draw-words")).to_contain_text("检查点的词汇里没有 house")


def test_choices_make_the_caption_and_unknown_words_are_named(page):
    page.locator("[name=size]").select_option("")
    page.locator("[name=color]").select_option("orange")
    page.locator("[name=shape]").select_option("arrow")
    page.locator("[name=background]").select_option("black")
    expect(page.locator("[name=caption]")).to_have_value("an orange arrow on a black background")
    expect(page.locator("#draw-words")).to_be_empty()
    page.locator("[name=caption]").fill("a red house with a garden")
    expect(page.locator("#draw-words")).to_contain_text("never saw house, with, garden")


def test_before_it_draws_the_page_is_light_and_asks_no_other_host(open_page, address):
    page = open_page("docs/teach")
    loaded = {}
    page.on("response", lambda answer: loaded.update({answer.url: len(answer.body())}))
    page.goto(f"{address}/index.html", wait_until="networkidle")
    assert all(url.startswith(address) for url in loaded)
    own = {
        url: size for url, size in loaded.items() if "/draw/" in url or url.endswith("index.html")
    }
    names = {url.rsplit("/", 1)[1] for url in own}
    assert {"index.html", "draw.js", "settings.json", "recorded.js", "recorded-0.webp"} <= names
    assert sum(own.values()) < 300_000


def test_it_can_be_cancelled_and_a_second_request_does_not_wait(page):
    ask(page, REQUESTS[0][0], steps=50)
    page.locator("[name=caption]").press("Enter")
    expect(said(page)).to_contain_text(re.compile(r"Step \d+ of 50"), timeout=120_000)
    ask(page, REQUESTS[1][0], steps=3)
    page.locator("[name=caption]").press("Enter")  # nothing comes of it
    expect(page.locator("#draw canvas")).to_have_attribute(
        "aria-label", f"Being drawn: {REQUESTS[0][0]}"
    )
    page.get_by_role("button", name="Cancel").click()
    expect(said(page)).to_have_text("Cancelled.")
    expect(page.locator("#draw canvas")).to_have_attribute(
        "aria-label", f"Not finished: {REQUESTS[0][0]}"
    )
    page.wait_for_timeout(300)
    expect(said(page)).to_have_text("Cancelled.")


FAILURES = {
    "no network": ("denoiser.onnx", None, "denoiser.onnx could not be loaded: is there a network?"),
    "missing file": ("decoder.onnx", {"status": 404}, r"decoder.onnx could not be loaded (404)"),
    "half a file": ("text_encoder.onnx", {"body": "half"}, "Drawing failed: "),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_file_that_does_not_load_is_named_and_recorded_images_shown(page, failure):
    name, answer, sentence = FAILURES[failure]
    page.route(f"**/{name}", lambda route: route.fulfill(**answer) if answer else route.abort())
    page.get_by_role("button", name="Draw").click()
    expect(said(page)).to_contain_text(sentence, timeout=60_000)
    expect(page.locator("#draw-recorded .recorded-picture").first).to_be_visible()


@pytest.mark.parametrize(
    ("spoiled", "sentence"),
    [
        ("WebAssembly.validate = () => false", "This browser has no WebAssembly with SIMD"),
        (
            "Blob.prototype.arrayBuffer = () => { throw new RangeError('no room') }",
            "There is too little memory",
        ),
    ],
    ids=["old", "small"],
)
def test_a_browser_that_cannot_draw_says_why(open_page, spoiled, sentence):
    page = open_page("index")
    page.evaluate(f"() => {{ {spoiled} }}")
    page.get_by_role("button", name="Draw").click()
    expect(said(page)).to_contain_text(sentence, timeout=60_000)
    expect(page.locator("#draw-recorded")).to_be_visible()


def test_a_site_without_the_model_shows_recorded_images(open_page, address, site):
    page = open_page("docs/teach")
    settings = json.loads((site / "draw" / "settings.json").read_text()) | {"bytes": {}}
    page.route("**/settings.json", lambda route: route.fulfill(json=settings))
    page.goto(f"{address}/index.html", wait_until="networkidle")
    expect(page.locator("#draw")).to_be_hidden()
    expect(page.locator("#draw-recorded")).to_be_visible()


def test_from_a_file_sliders_choose_among_recorded_images(open_page, site):
    page = open_page("docs/teach")
    page.goto((site / "index.html").as_uri())
    expect(page.locator("#draw")).to_be_hidden()
    picture = page.locator(".recorded-picture").first
    expect(picture).to_have_attribute(
        "aria-label", f"{browser_demo.CAPTIONS[0]}, after 30 steps at guidance scale 3"
    )
    before = picture.evaluate("picture => picture.style.backgroundPosition")
    page.locator(".recorded input").first.fill("2")
    expect(picture).to_have_attribute(
        "aria-label", f"{browser_demo.CAPTIONS[0]}, after 3 steps at guidance scale 3"
    )
    assert picture.evaluate("picture => picture.style.backgroundPosition") != before


def test_without_scripts_all_recorded_images_are_there(open_page):
    page = open_page("notebooks/04_jit_pipeline", java_script_enabled=False)
    sheets = page.locator(".recorded img")
    assert sheets.count() == len(browser_demo.CAPTIONS)
    for sheet in sheets.all():
        expect(sheet).to_be_visible()
        assert "top to bottom guidance scale 1, 2" in sheet.get_attribute("alt")
    expect(page.locator(".recorded-controls")).to_be_hidden()


def test_without_npm_the_site_says_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(browser_demo, "MADE", tmp_path)
    monkeypatch.setattr(browser_demo.shutil, "which", lambda name: None)
    with pytest.raises(
        RuntimeError, match=r"npm is missing, which brings the page's runtime: install Node\.js\."
    ):
        browser_demo.fetch_runtime()
