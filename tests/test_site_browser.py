"""The site as people see it: in Chromium, which .ci/run installs."""

import os
import re
from pathlib import Path

import pytest
from playwright.sync_api import expect

from lab.site.printing import CHROMIUM, NO_SANDBOX

ROOT = Path(__file__).resolve().parents[1]
SIZES = {
    "phone": {"viewport": {"width": 360, "height": 740}, "is_mobile": True},
    "desktop": {"viewport": {"width": 1280, "height": 900}},
}
# Pages of every sort, for what takes long to look at.
SAMPLE = (
    "index",
    "docs/troubleshooting",
    "docs/reference",
    "docs/glossary",
    "docs/versions",
    "docs/teach",
    "notebooks/04_jit_pipeline",
    "notebooks/06_block_until_ready_timing",
    "checkpoints/shapes-sd/README",
    "zh-CN/index",
    "zh-CN/docs/tpu-report",
    "zh-CN/notebooks/03_replicate_shard",
)

# For each piece of text: its contrast with what is behind it, as WCAG counts it, where it is, and
# the size of its letters. The least contrast comes first.
CONTRAST = """() => {
  const parse = text => text.match(/[\\d.]+/g).map(Number);
  const linear = v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const luminance = ([r, g, b]) =>
    0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const behind = element => {
    for (let e = element; e; e = e.parentElement) {
      const color = parse(getComputedStyle(e).backgroundColor);
      if (color.length === 3 || color[3] === 1) return color;
    }
    return [255, 255, 255];
  };
  const ignored = "[aria-hidden=true], .headerlink, .visually-hidden, script, style";
  const found = [];
  const walker = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || element.closest(ignored)) continue;
    if (!element.checkVisibility({visibilityProperty: true})) continue;
    const style = getComputedStyle(element);
    const lights = [parse(style.color), behind(element)].map(luminance);
    const contrast = (Math.max(...lights) + 0.05) / (Math.min(...lights) + 0.05);
    const where = `${element.className || element.tagName}: ${element.textContent.slice(0, 40)}`;
    found.push([contrast, where, parseFloat(style.fontSize)]);
  }
  return found.sort((x, y) => x[0] - y[0]);
}"""
# The pictures that are broken or have no text in their place. Those far below have to be called.
PICTURES = """async all => {
  for (const picture of all) picture.loading = "eager";
  await Promise.all(all.map(picture => picture.decode().catch(() => {})));
  return all.filter(picture => !picture.alt || !picture.naturalWidth).map(picture => picture.src);
}"""
# How wide a visible block of code would like to be with a line of so many signs, how wide it is,
# and what becomes of the rest.
CODE_WIDTH = """columns => {
  const code = document.querySelector(".cell_input:not(details *) pre");
  code.textContent = "x".repeat(columns);
  return [code.scrollWidth, code.clientWidth, getComputedStyle(code).overflowX];
}"""


def test_every_page_loads_without_errors_and_missing_files(site, browser, address):
    names = sorted(
        str(page.relative_to(site)) for page in site.rglob("*.html") if "_static" not in page.parts
    )
    problems = []
    page = browser.new_page()
    page.on(
        "console",
        lambda message: message.type in ("error", "warning") and problems.append(message.text),
    )
    page.on("pageerror", lambda error: problems.append(str(error)))
    # What one page still loads, the next one aborts.
    page.on(
        "requestfailed",
        lambda request: "ABORTED" in request.failure or problems.append(request.url),
    )
    page.on(
        "response",
        lambda answer: answer.status >= 400 and problems.append(f"{answer.status} {answer.url}"),
    )
    page.on(
        "request",
        lambda request: request.url.startswith((address, "data:")) or problems.append(request.url),
    )
    for name in names:
        page.goto(f"{address}/{name}", wait_until="load")
        pictures = page.eval_on_selector_all("img", PICTURES)
        assert pictures == [], f"without a text in their place, or broken, in {name}"
        assert problems == [], name
    page.close()


@pytest.mark.parametrize(
    ("start", "word", "where"),
    [
        ("index", "addressable_shards", "03_replicate_shard"),
        ("zh-CN/index", "词元编号", "03_replicate_shard"),
        ("zh-CN/index", "轴", "03_replicate_shard"),
        ("zh-CN/index", "addressable_shards", "03_replicate_shard"),
        ("zh-CN/index", "CFG Scale", "glossary"),
        ("zh-CN/index", "管线", "glossary"),
    ],
)
def test_the_search_finds_a_word(open_page, start, word, where):
    """Chinese in part of a sentence, a single sign, what is English in both, and other words."""
    page = open_page(start)
    page.keyboard.press("Control+k")
    page.keyboard.insert_text(word)
    page.keyboard.press("Enter")
    results = page.locator("#search-results li a")
    expect(results.first).to_be_visible()
    found = page.locator(f"#search-results li a[href*='{where}']")
    expect(found.first).to_be_visible()


def test_a_term_is_found_first_where_it_is_explained(open_page):
    page = open_page("search")
    page.goto(f"{page.url}?q=guidance+scale")
    first = page.locator("#search-results li > a").first
    expect(first).to_have_attribute("href", re.compile("glossary.*#term-guidance-scale"))
    first.click()
    page.locator("#term-guidance-scale + dd, #term-CFG-scale + dd").get_by_role(
        "link", name="Chapter 4"
    ).click()
    expect(page.get_by_role("heading", name="What the guidance scale does")).to_be_visible()


@pytest.mark.parametrize(
    ("start", "query"), [("", "XL+memory"), ("", "SDXL+memory"), ("zh-CN/", "SDXL+显存")]
)
def test_the_memory_of_xl_is_found_first(open_page, start, query):
    page = open_page(f"{start}search")
    page.goto(f"{page.url}?q={query}")
    first = page.locator("#search-results li > a").first
    expect(first).to_have_attribute("href", re.compile("glossary"))
    first.click()
    page.locator("dd:visible a[href='real-models.html']").first.click()
    expect(page.get_by_role("cell", name=re.compile(r"8\.9 GB"))).to_be_visible()


@pytest.mark.parametrize(
    ("start", "word", "said"), [("", "xylophone", "did not match"), ("zh-CN/", "象牙塔", "没有")]
)
def test_a_word_that_is_nowhere_is_not_found(open_page, start, word, said):
    page = open_page(f"{start}search")
    page.goto(f"{page.url}?q={word}")
    expect(page.locator("#search-results .search-summary")).to_contain_text(said)


@pytest.mark.parametrize("name", ["index", "zh-CN/index"])
@pytest.mark.parametrize(("width", "height"), [(360, 740), (768, 1024), (1280, 720)])
def test_the_first_screen_has_a_picture_and_three_ways_in(
    open_page, screenshots, name, width, height
):
    page = open_page(name, viewport={"width": width, "height": height})
    ways = page.locator(".ways-in a")
    assert ways.count() == 3
    for part in (page.locator("img.appearing"), *ways.all()):
        expect(part).to_be_in_viewport(ratio=1)
    page.screenshot(path=screenshots / f"first-{name.replace('/', '-')}-{width}.png")
    for own in ("#draw-here", "#start"):
        page.locator(f".ways-in a[href='{own}']").click()
        expect(page.locator(own)).to_be_in_viewport()


@pytest.mark.parametrize("size", SIZES)
def test_the_language_can_be_switched_on_every_page(open_page, size):
    page = open_page("notebooks/03_replicate_shard", **SIZES[size])
    page.get_by_role("link", name="中文").click()
    expect(page.locator("html")).to_have_attribute("lang", "zh-CN")
    assert page.url.endswith("/zh-CN/notebooks/03_replicate_shard.html")
    page.get_by_role("link", name="English").click()
    expect(page.locator("html")).to_have_attribute("lang", "en")
    assert page.url.endswith("/notebooks/03_replicate_shard.html")


NO_CHINESE = """<?xml version="1.0"?>
<fontconfig>
  <include>/etc/fonts/fonts.conf</include>
  <selectfont><rejectfont><glob>*CJK*</glob></rejectfont></selectfont>
</fontconfig>
"""


def test_chinese_pages_say_where_there_is_no_font_for_them(
    open_page, browser, address, screenshots, tmp_path
):
    if open_page("zh-CN/index").locator(".no-font").count():
        pytest.skip("There is no Chinese font here: apt-get install fonts-noto-cjk")
    fonts = tmp_path / "fonts.conf"
    fonts.write_text(NO_CHINESE)
    bare = browser.browser_type.launch(
        executable_path=CHROMIUM, args=NO_SANDBOX, env=os.environ | {"FONTCONFIG_FILE": str(fonts)}
    )
    page = bare.new_page()
    page.goto(f"{address}/zh-CN/notebooks/03_replicate_shard.html")
    expect(page.locator("article .no-font")).to_contain_text("apt-get install fonts-noto-cjk")
    page.screenshot(path=screenshots / "zh-CN-without-a-font.png")
    page.get_by_role("link", name="English").click()
    expect(page.locator(".no-font")).to_have_count(0)
    bare.close()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_pages_are_legible(open_page, screenshots, dark, size):
    for name in SAMPLE:
        page = open_page(name, dark=dark, **SIZES[size])
        assert page.locator("html").get_attribute("data-theme") == ("dark" if dark else "light")
        page.wait_for_load_state("networkidle")
        found = page.evaluate(CONTRAST)
        assert len(found) > 20
        assert found[0][0] >= 4.5, f"{name}: contrast {found[0]}"
        assert min(size for _, _, size in found) >= 11, name
        # The window's inner width grows with a page that is too wide for the phone.
        sizes = "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
        width, room = page.evaluate(sizes)
        assert width <= room, f"{name} is wider than the window"
        page.screenshot(
            path=screenshots / f"{name.replace('/', '-')}-{size}-{'dark' if dark else 'light'}.png"
        )


@pytest.mark.parametrize("folder", ["", "zh-CN/"])
def test_code_of_88_columns_fits_and_what_is_longer_scrolls(open_page, folder):
    page = open_page(f"{folder}notebooks/03_replicate_shard", **SIZES["desktop"])
    wanted, room, _ = page.evaluate(CODE_WIDTH, 88)
    assert wanted <= room
    wanted, room, overflow = page.evaluate(CODE_WIDTH, 200)
    assert wanted > room and overflow == "auto"


@pytest.mark.parametrize(
    "name", ["notebooks/04_jit_pipeline", "notebooks/06_block_until_ready_timing"]
)
def test_pictures_stand_on_a_light_ground_in_the_dark(open_page, name):
    """What is transparent in a picture, or drawn in black, shows what is behind it."""
    page = open_page(name, dark=True)
    grounds = page.eval_on_selector_all(
        ".cell_output img",
        "all => all.map(i => getComputedStyle(i).backgroundColor.match(/[\\d.]+/g).map(Number))",
    )
    assert grounds
    assert all(min(ground[:3]) > 180 and len(ground) == 3 for ground in grounds), grounds


def test_the_mode_can_be_chosen(open_page):
    page = open_page("index")
    page.get_by_role("button", name="Color mode").first.click()
    page.get_by_role("button", name="Dark").first.click()
    assert page.locator("html").get_attribute("data-theme") == "dark"
    page.goto(page.url.replace("index", "docs/teach"))
    assert page.locator("html").get_attribute("data-theme") == "dark", "and it stays so"


def test_the_keyboard_reaches_the_navigation(open_page):
    page = open_page("notebooks/03_replicate_shard")
    page.keyboard.press("Tab")
    assert "Skip to main content" in page.evaluate("document.activeElement.textContent")
    reached = []
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.getAttribute('href') || ''"))
        if reached[-1].endswith("04_jit_pipeline.html"):
            break
    assert any(link.endswith("install.html") for link in reached), "the sections, above"
    assert reached[-1].endswith("04_jit_pipeline.html"), "the chapters, at the side"
    ring = page.evaluate(
        "(s => [s.outlineStyle, s.boxShadow])(getComputedStyle(document.activeElement))"
    )
    assert ring != ["none", "none"], "where the keyboard is can be seen"
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile("04_jit_pipeline.html"))


def test_on_a_phone_the_chapters_are_behind_a_button(open_page):
    page = open_page("notebooks/03_replicate_shard", **SIZES["phone"])
    page.locator(".primary-toggle").click()
    link = page.locator("dialog[open] a[href='04_jit_pipeline.html']").first
    expect(link).to_be_visible()
    link.click()
    expect(page).to_have_url(re.compile("04_jit_pipeline.html"))


def test_a_solution_unfolds(open_page):
    page = open_page("notebooks/04_jit_pipeline")
    solution = page.locator(".tag_solution").first
    expect(solution.locator("img")).to_be_hidden()
    solution.get_by_text("Show the solution").click()
    expect(solution.locator("img")).to_be_visible()


# What the buttons of the quiz and its sentences are called.
QUIZ = {
    "": ("Check", "Right: 2", "Not quite. The answer is: 2", "Forget all my answers"),
    "zh-CN/": ("核对", "对了：2", "不太对。答案是：2", "清除我的全部回答"),
}


@pytest.mark.parametrize("folder", QUIZ)
def test_a_prediction_is_judged_kept_and_forgotten_by_keyboard(open_page, folder):
    check, right, wrong, forget = QUIZ[folder]
    page = open_page(f"{folder}notebooks/05_manual_pmap")
    form = page.locator("form.quiz[data-cell='05-toy-input']")
    answer = page.locator("form.quiz[data-cell='05-toy-input'] + .cell pre").first
    sentence = form.get_by_role("status")
    expect(answer).to_be_hidden()
    for given, said, unfolded in (("two", "2.1", False), ("6", wrong, True), (" 2 ", right, True)):
        form.get_by_role("textbox").fill(given)
        page.keyboard.press("Tab")
        expect(form.get_by_role("button", name=check)).to_be_focused()
        page.keyboard.press("Enter")
        expect(sentence).to_contain_text(said)
        expect(answer).to_be_visible(visible=unfolded)
    page.reload()
    expect(form.get_by_role("textbox")).to_have_value(" 2 ")
    expect(sentence).to_have_text(right)
    expect(answer).to_be_visible()
    mark = page.locator("nav.bd-links a[aria-current='page'] .answered").first
    expect(mark).to_have_text("1/3")
    page.goto(page.url.replace("notebooks/05_manual_pmap", "docs/progress"))
    row = page.locator("#progress tr[data-chapter='05_manual_pmap'] td")
    expect(row).to_have_text([re.compile("pmap"), "3", "1", "1"])
    page.get_by_role("button", name=forget).focus()
    page.keyboard.press("Enter")
    expect(row).to_have_text([re.compile("pmap"), "3", "0", "0"])
    page.go_back()
    page.reload()
    expect(form.get_by_role("textbox")).to_have_value("")
    expect(answer).to_be_hidden()


def test_choices_shapes_and_free_answers_are_taken(open_page):
    page = open_page("notebooks/02_bf16_loading")
    form = page.locator("form.quiz[data-cell='02-stored-code']")
    form.get_by_role("radio", name="in float32 both times").check()
    form.get_by_role("button").click()
    expect(form.get_by_role("status")).to_have_text(
        "Not quite. The answer is: in bfloat16 both times"
    )
    form.get_by_role("radio", name="in bfloat16 both times").check()
    form.get_by_role("button").click()
    expect(form.get_by_role("status")).to_have_text("Right: in bfloat16 both times")
    page.goto(page.url.replace("02_bf16_loading", "03_replicate_shard"))
    form = page.locator("form.quiz[data-cell='03-shard-two-code']")
    shape = form.locator("[data-answer]").get_attribute("data-answer")
    form.get_by_role("textbox").fill(shape.strip("()").replace(",", " ×"))
    form.get_by_role("button").click()
    expect(form.get_by_role("status")).to_have_text(f"Right: {shape}")
    page.goto(page.url.replace("03_replicate_shard", "10_many_hosts"))
    form = page.locator("form.quiz[data-cell='10-57']")
    form.get_by_role("textbox").fill("none, I hope")
    form.get_by_role("button").click()
    expect(form.get_by_role("status")).to_have_text("Compare it with the output below.")
    page.reload()
    expect(form.get_by_role("textbox")).to_have_value("none, I hope")


def test_without_scripts_predictions_unfold(open_page):
    page = open_page("notebooks/03_replicate_shard", java_script_enabled=False)
    expect(page.locator("form.quiz").first).to_be_hidden()
    cell = page.locator(".tag_predict").first
    expect(cell.locator("pre").first).to_be_hidden()
    cell.get_by_text("Show the answer").click()
    expect(cell.locator("pre").first).to_be_visible()


@pytest.mark.parametrize(
    ("folder", "before", "after"), [("", "Copy", "Copied"), ("zh-CN/", "复制", "已复制")]
)
def test_code_is_copied_by_a_button_that_the_keyboard_reaches(open_page, folder, before, after):
    permissions = ["clipboard-read", "clipboard-write"]
    page = open_page(f"{folder}notebooks/03_replicate_shard", permissions=permissions)
    block = page.locator(".cell_input:not(details *) div.highlight").first
    code = block.locator("pre").inner_text()
    button = block.get_by_role("button", name=before)
    button.focus()
    expect(button).to_have_css("opacity", "1")
    page.keyboard.press("Enter")
    expect(block.get_by_role("button")).to_have_text(after)
    assert page.evaluate("navigator.clipboard.readText()") == code.rstrip("\n")
    assert page.locator(".cell_output button.copy-code").count() == 0


def test_an_example_with_prompts_is_copied_as_a_person_types_it(open_page):
    page = open_page("docs/reference", permissions=["clipboard-read", "clipboard-write"])
    block = page.locator("div.highlight", has_text=">>> ").first
    typed = []
    for line in block.locator("pre").inner_text().splitlines():
        if line.startswith((">>> ", "... ")):
            typed.append(line[4:])
    assert typed
    block.get_by_role("button").click()
    expect(block.get_by_role("button")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "\n".join(typed)


def test_an_address_where_nothing_is_leads_on(open_page):
    page = open_page("404")
    expect(page.get_by_role("heading", level=1)).to_have_text("There is no such page")
    page.get_by_role("link", name="中文首页").click()
    expect(page.locator("html")).to_have_attribute("lang", "zh-CN")
