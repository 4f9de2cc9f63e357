"""The landing page draws what JAX draws, and says in a sentence what goes wrong."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from playwright.sync_api import expect

from course import flux2
from course.shapes import judge, scenes
from lab.site import browser_demo

# Caption, seed, steps. The checkpoint does not know the last caption's words.
REQUESTS = [
    (browser_demo.DRAWN[0], 0, 4),
    ("a small yellow star on a blue background", 7, 4),
    ("a medium green ring on a black background", 42, 4),
    ("a large purple moon on a pink background", 99, 1),
    ("a large white cross on a red background", 3, 4),
    ("Ein großes  rotes Herz's, 3 mal!", 5, 2),
]
EDITS = [(0, "blue", 0, 2), (1, "a moon", 3, 4), (3, "a white background", 11, 2)]


@pytest.fixture
def page(open_page):
    page = open_page("index")
    expect(page.locator("#draw")).to_be_visible()
    return page


@pytest.fixture(scope="module")
def in_jax():
    """What JAX draws, from 0 to 255."""
    params, config, tokenize = flux2.load(browser_demo.CHECKPOINT, jnp.float32)
    side = config.side
    program = jax.jit(flux2.generate, static_argnames=flux2.STATIC)

    def draw(caption, seed, steps, scene=None):
        images = None
        if scene is not None:
            images = jnp.float32(scenes.render(browser_demo.SCENES[scene], side) / 255)[None]
        noise = flux2.random_tokens(jax.random.key(seed), config, 1, side, side)
        drawn = program(
            params, config, *tokenize([caption]), noise, side, side, steps, images=images
        )
        return 255 * np.asarray(drawn[0])

    return draw


def ask(page, caption, seed=0, steps=4):
    page.locator("[name=steps]").select_option(str(steps))
    page.locator("[name=seed]").fill(str(seed))
    page.locator("[name=caption]").fill(caption)


def pixels(page):
    code = "c => [...c.getContext('2d').getImageData(0, 0, 64, 64).data]"
    values = page.locator("#draw-canvas").evaluate(code)
    return np.array(values, np.float32).reshape(64, 64, 4)[..., :3]


def said(page):
    return page.locator("#draw-said")


def press_draw(page):
    page.get_by_role("button", name="Draw").click()
    expect(said(page)).to_contain_text("Drawn in", timeout=120_000)


def wait_for(page, caption):
    """Wait until an image of a caption is drawn from what the form says now."""
    expect(page.locator("#draw-canvas")).to_have_attribute("aria-label", caption, timeout=30_000)
    page.wait_for_function("document.getElementById('draw').dataset.state === 'ready'")


def test_captions_are_drawn_and_scenes_edited_as_jax_does_while_one_types(
    page, in_jax, screenshots
):
    warnings = []
    page.on("console", lambda message: warnings.append(message.text))
    press_draw(page)
    right = 0
    for caption, seed, steps in REQUESTS:
        ask(page, caption, seed, steps)
        wait_for(page, caption)
        found = pixels(page)
        assert np.abs(found - in_jax(caption, seed, steps)).max() < 2, caption
        scene = judge.read_scene(found.astype(np.uint8))
        if not isinstance(scene, judge.Refusal):
            read = scenes.caption(scene.size, scene.color, scene.shape, scene.background)
            right += read == caption
    assert right >= 3, "the judge reads what the captions say"
    page.screenshot(path=screenshots / "index-drawn.png")
    page.get_by_role("tab", name="Edit").click()
    for scene, change, seed, steps in EDITS:
        page.locator("[name=scene]").nth(scene).check()
        ask(page, change, seed, steps)
        wait_for(page, change)
        assert np.abs(pixels(page) - in_jax(change, seed, steps, scene)).max() < 2, change
    page.screenshot(path=screenshots / "index-edited.png")
    # This test itself reads the canvas.
    assert [text for text in warnings if "willReadFrequently" not in text] == []


def test_what_is_drawn_first_stands_there_from_the_start(page):
    canvas = page.locator("#draw-canvas")
    expect(canvas).to_have_attribute("aria-label", REQUESTS[0][0])
    recorded = pixels(page)
    expect(said(page)).to_contain_text(re.compile(r"Draw loads \d+ MB the first time"))
    press_draw(page)
    assert np.abs(pixels(page) - recorded).mean() < 4, "but for what compressing changed"


def test_what_was_loaded_is_kept_and_what_is_older_is_not(page):
    press_draw(page)
    page.evaluate("async () => (await caches.open('draw')).put('/old', new Response('old'))")
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.reload()
    expect(said(page)).to_have_text("All that Draw needs is here already.")
    press_draw(page)
    kept = (*browser_demo.MODELS, browser_demo.RUNTIME[1])
    assert not [url for url in asked if any(f"/{name}?" in url for name in kept)]
    urls = page.evaluate("async () => (await (await caches.open('draw')).keys()).map(r => r.url)")
    assert len(urls) == len(kept)


def test_tabs_are_turned_by_arrows(page):
    drawing, editing = page.get_by_role("tab").all()
    drawing.focus()
    page.keyboard.press("ArrowRight")
    expect(editing).to_be_focused()
    expect(editing).to_have_attribute("aria-selected", "true")
    expect(page.locator("#draw-scenes")).to_be_visible()
    expect(page.locator("[name=caption]")).to_have_value("blue")
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#draw-scenes")).to_be_hidden()
    expect(page.locator("[name=caption]")).to_have_value(browser_demo.DRAWN[0])


def test_the_chinese_page_draws_and_speaks_chinese(open_page):
    page = open_page("zh-CN/index")
    expect(page.locator("#draw")).to_be_visible()
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
    page.goto(f"{address}/index.html")
    # On a busy machine the network may be idle before the page's script begins.
    for name in ("settings.json", "drawn.webp", "scenes.webp"):
        page.wait_for_function(
            "name => performance.getEntriesByType('resource').some(e => e.name.endsWith(name))",
            arg=name,
            timeout=120_000,
        )
    page.wait_for_load_state("networkidle")
    assert all(url.startswith(address) for url in loaded)
    own = {
        url: size for url, size in loaded.items() if "/draw/" in url or url.endswith("index.html")
    }
    names = {url.rsplit("/", 1)[1] for url in own}
    assert {"index.html", "draw.js", "settings.json", "drawn.webp", "scenes.webp"} <= names
    assert sum(own.values()) < 300_000


def test_loading_can_be_cancelled_and_begun_again(page):
    page.route("**/decoder.onnx?*", lambda route: None)  # which never comes
    page.get_by_role("button", name="Draw").click()
    expect(said(page)).to_contain_text("Loading")
    page.wait_for_function("() => !document.querySelector('[name=cancel]').disabled")
    page.get_by_role("button", name="Cancel").click()
    expect(said(page)).to_have_text("Cancelled.")
    page.unroute("**/decoder.onnx?*")
    press_draw(page)


FAILURES = {
    "no network": ("drawer.onnx", None, "drawer.onnx could not be loaded: is there a network?"),
    "missing file": ("decoder.onnx", {"status": 404}, r"decoder.onnx could not be loaded (404)"),
    "half a file": ("text_encoder.onnx", {"body": "half"}, "Drawing failed: "),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_file_that_does_not_load_is_named_and_recorded_images_shown(page, failure):
    name, answer, sentence = FAILURES[failure]
    page.route(f"**/{name}?*", lambda route: route.fulfill(**answer) if answer else route.abort())
    page.get_by_role("button", name="Draw").click()
    expect(said(page)).to_contain_text(sentence, timeout=60_000)
    expect(page.locator("#draw-recorded img")).to_be_visible()


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
    settings = json.loads((site / "draw" / "settings.json").read_text()) | {"isWhole": False}
    page.route("**/settings.json", lambda route: route.fulfill(json=settings))
    page.goto(f"{address}/index.html", wait_until="networkidle")
    expect(page.locator("#draw")).to_be_hidden()
    expect(page.locator("#draw-recorded")).to_be_visible()


def test_from_a_file_sliders_choose_among_recorded_images(open_page, site):
    page = open_page("docs/teach")
    page.goto((site / "index.html").as_uri())
    expect(page.locator("#draw")).to_be_hidden()
    expect(page.locator("#draw-recorded img")).to_be_visible()
    page.goto((site / "notebooks" / "04_jit_pipeline.html").as_uri())
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
