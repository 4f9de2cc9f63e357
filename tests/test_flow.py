"""The widgets of chapter 15 compute what it does, and a network learns in the page."""

import json
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import nbformat
import numpy as np
import pytest
from bs4 import BeautifulSoup
from playwright.sync_api import expect

from course import flux2
from lab.site import build_site

ROOT = Path(__file__).resolve().parents[1]
CHAPTER = ROOT / "notebooks" / "15_from_noise.ipynb"
NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="there is no Node.js")
LANGUAGES = {
    "": ("Train", "Trained in", "Straighten", "before it was"),
    "zh-CN/": ("训练", "训练用了", "拉直", "拉直之前是"),
}


def in_node(code):
    """What a piece of JavaScript prints as JSON that knows the modules of the widgets."""
    code = f'import * as flow from "./flow.mjs"; import * as network from "./network.mjs"; {code}'
    command = [NODE, "--input-type=module", "--eval", code]
    done = subprocess.run(command, cwd=build_site.FLOW, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs_node
def test_the_velocity_and_the_times_are_those_of_the_chapter():
    cells = {cell.id: cell.source for cell in nbformat.read(CHAPTER, as_version=4).cells}
    chapter = {"jax": jax, "jnp": jnp}
    for name in ("15-data", "15-exact"):
        exec(cells[name], chapter)
    code = """
      const places = Array.from({length: 61}, (_, k) => -3 + k / 10);
      const velocity = [1, 0.6, 0.2, 0.02].map((t) => places.map((x) => flow.meanVelocity(x, t)));
      console.log(JSON.stringify({velocity, times: [flow.times(4), flow.times(5, 3)]}));
    """
    found = in_node(code)
    places = jnp.linspace(-3, 3, 61)
    expected = [chapter["mean_velocity"](places, t) for t in (1, 0.6, 0.2, 0.02)]
    assert np.allclose(found["velocity"], expected, rtol=1e-3, atol=1e-3)
    assert np.allclose(found["times"][0], flux2.times(4))
    assert np.allclose(found["times"][1], flux2.times(5, 3))


@needs_node
def test_once_paths_are_straightened_one_step_ends_where_many_do():
    code = """
      const noise = flow.fillNormal(new Float64Array(2000), flow.uniformFrom(1)).sort();
      const mean = (x, t) => x.map((value) => flow.meanVelocity(value, t));
      const ends = flow.follow(mean, noise, flow.times(200)).at(-1);
      const straight = flow.straightVelocity(noise, ends);
      const off = [1, 2, 7].map((steps) =>
        [mean, straight].map((velocity) =>
          flow.meanDistance(flow.follow(velocity, noise, flow.times(steps)).at(-1), ends, 1)));
      console.log(JSON.stringify(off));
    """
    curved, straight = np.transpose(in_node(code))
    assert curved[0] > 0.5
    assert (straight < 1e-9).all()


@needs_node
def test_gradients_are_the_slopes_of_the_loss():
    code = """
      const uniform = flow.uniformFrom(3);
      const [x, target] = [0, 0].map(() => flow.fillNormal(new Float32Array(14), uniform));
      const t = Float32Array.from({length: 7}, uniform);
      const parameters = network.createNetwork(0);
      const [gradients, unused] = [0, 0].map(() => new Float32Array(parameters.length));
      const loss = (k, by) => {
        const moved = parameters.slice();
        moved[k] += by;
        return network.lossAndGradients(moved, x, t, target, unused);
      };
      network.lossAndGradients(parameters, x, t, target, gradients);
      const pairs = [];
      for (let k = 0; k < parameters.length; k += 61) {
        pairs.push([gradients[k], (loss(k, 0.01) - loss(k, -0.01)) / 0.02]);
      }
      console.log(JSON.stringify(pairs));
    """
    gradients, slopes = np.transpose(in_node(code))
    assert np.abs(slopes).max() > 0.1
    assert np.allclose(gradients, slopes, rtol=1e-2, atol=1e-3)


@needs_node
def test_it_learns_points_and_one_step_is_enough_once_it_is_straightened():
    code = """
      const points = network.pointsOf("ring");
      const parameters = network.createNetwork(0);
      const losses = [...network.learn(parameters, points, 1, 250)];
      const again = network.createNetwork(0);
      const same = [...network.learn(again, points, 1, 250)].every((loss, k) => loss === losses[k]);
      const noise = flow.fillNormal(new Float32Array(400), flow.uniformFrom(5));
      const end = (steps) => [...network.flow(parameters, noise, steps).at(-1)];
      const report = () => [1, 16, 64].map(end);
      const learned = report();
      [...network.straighten(parameters, 2, 250)];
      console.log(JSON.stringify({losses, same, learned, straightened: report()}));
    """
    found = in_node(code)
    assert found["same"], "the same seed gives the same losses"
    assert np.mean(found["losses"][-50:]) < 0.9 * np.mean(found["losses"][:20])
    off = {}
    for name in ("learned", "straightened"):
        one, several, fine = np.reshape(found[name], (3, -1, 2))
        radius = np.linalg.norm(several, axis=-1)
        assert np.abs(radius - 1.5).mean() < 0.2, "in 16 steps the noise is on the ring"
        off[name] = np.linalg.norm(one - fine, axis=-1).mean()
    assert off["straightened"] < 0.25 * off["learned"]


# On the site


@pytest.mark.parametrize("folder", LANGUAGES)
def test_widgets_stand_in_the_sections_that_teach_what_they_show(site, folder):
    language = folder.strip("/") or "en"
    for name, widgets in build_site.WIDGETS.items():
        chapter = nbformat.read(build_site.NOTEBOOKS[language] / f"{name}.ipynb", as_version=4)
        ids = [cell.id for cell in chapter.cells]
        page = (site / folder / "notebooks" / f"{name}.html").read_text()
        sections = BeautifulSoup(page, "html.parser").select("article section section section")
        for widget in widgets:
            before = chapter.cells[: ids.index(widget.behind) + 1]
            text = "\n".join(cell.source for cell in before if cell.cell_type == "markdown")
            taught = re.findall(r"^## (.+)$", text, flags=re.MULTILINE)[-1]
            own = [
                s for s in sections if s.find("h3").get_text().startswith(widget.title[language])
            ]
            assert len(own) == 1, widget.title
            heading = own[0].parent.find("h2").get_text().replace("’", "'")
            assert heading.startswith(taught)
            assert own[0].find("script"), "the widget itself"


@pytest.mark.parametrize("folder", LANGUAGES)
def test_sliders_move_a_flow_in_one_dimension(open_page, folder):
    page = open_page(f"{folder}notebooks/15_from_noise")
    form = page.locator(".flow-line")
    expect(form.locator(".flow-said")).to_contain_text("4")
    before = form.locator("circle").first.get_attribute("cx")
    form.locator("[name=time]").focus()
    for _ in range(5):
        page.keyboard.press("ArrowLeft")
    assert float(form.locator("circle").first.get_attribute("cx")) < float(before)
    distances = []
    for steps in ("0", "7"):
        form.locator("[name=steps]").fill(steps)
        distances.append(form.locator(".flow-said").inner_text())
    assert distances[0] != distances[1]
    lines = form.locator(".flow-time")
    assert lines.count() == 33
    places = lines.nth(16).get_attribute("points")
    form.locator("[name=shift]").fill("4")
    assert lines.nth(16).get_attribute("points") != places


@pytest.mark.parametrize("folder", LANGUAGES)
def test_a_network_learns_in_the_page_what_the_keyboard_draws(open_page, screenshots, folder):
    page = open_page(f"{folder}notebooks/15_from_noise")
    train, trained, straighten, before = LANGUAGES[folder]
    form = page.locator(".flow-plane")
    said = form.locator(".flow-said")
    form.locator("canvas.flow-field").focus()
    page.keyboard.press(" ")
    expect(form.locator("[name=shape]")).to_have_value("own")
    form.get_by_role("button", name=train).click()
    expect(said).to_contain_text("20")  # points at least
    form.locator("canvas.flow-field").focus()
    for _ in range(12):
        page.keyboard.press("ArrowRight")
        page.keyboard.press(" ")
    form.get_by_role("button", name=train).click()
    expect(said).to_contain_text(trained, timeout=60_000)
    form.locator("summary").click()
    form.get_by_role("button", name=straighten).click()
    expect(said).to_contain_text(before, timeout=60_000)
    form.screenshot(path=screenshots / f"flow-plane-{folder[:2] or 'en'}.png")
    _, now, then = map(float, re.findall(r"\d+\.\d+", said.inner_text()))
    assert now < 0.5 * then, "one step ends nearer to where many end"


def test_print_and_a_browser_without_scripts_have_still_pictures(open_page):
    page = open_page("notebooks/15_from_noise", java_script_enabled=False)
    assert page.locator(".still img").count() == 2
    for picture in page.locator(".still img").all():
        expect(picture).to_be_visible()
    page = open_page("notebooks/15_from_noise")
    expect(page.locator(".still img").first).to_be_hidden()
    page.emulate_media(media="print")
    expect(page.locator(".still img").first).to_be_visible()
    expect(page.locator(".flow-line")).to_be_hidden()
    page = open_page("notebooks/04_jit_pipeline")
    expect(page.locator(".recorded img").first).to_be_hidden()
    page.emulate_media(media="print")
    expect(page.locator(".recorded img").first).to_be_visible()


@pytest.mark.parametrize("folder", LANGUAGES)
def test_the_book_has_the_still_pictures(site, folder):
    with zipfile.ZipFile(site / folder / f"{build_site.BOOK}.epub") as book:
        page = book.read("notebooks/15_from_noise.xhtml").decode()
    for name in ("line.webp", "plane.webp"):
        assert name in page
