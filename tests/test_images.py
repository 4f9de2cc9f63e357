"""image_grid."""

import warnings

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image, ImageFont

from helpers import image_grid, images


def image(value=0.5, side=64):
    return np.full((1, side, side, 3), value, np.float32)


@pytest.mark.parametrize(
    ("count", "rows", "columns"), [(1, 1, 1), (3, 1, 3), (7, 2, 4), (8, 2, 4), (16, 4, 4)]
)
def test_any_number_of_images_makes_a_grid(count, rows, columns):
    grid = image_grid(np.zeros((count, 64, 64, 3)))
    assert grid.size == (columns * 196 - 4, rows * 196 - 4)


def test_device_and_batch_axes_are_laid_out_in_order():
    levels = np.linspace(0, 1, 6, dtype=np.float32)
    images = np.broadcast_to(levels.reshape(3, 2, 1, 1, 1), (3, 2, 200, 200, 3))
    grid = image_grid(images, columns=2)
    seen = [grid.getpixel((x + 10, y + 10))[0] for y in (0, 204, 408) for x in (0, 204)]
    assert seen == [round(level * 255) for level in levels]


def test_all_kinds_of_images_look_the_same():
    values = np.linspace(0, 1, 64 * 64 * 3, dtype=np.float32).reshape(1, 64, 64, 3)
    bytes_ = np.rint(values * 255).astype(np.uint8)
    reference = np.asarray(image_grid(values))
    assert np.array_equal(reference, np.asarray(image_grid(bytes_)))
    assert np.array_equal(reference, np.asarray(image_grid([Image.fromarray(bytes_[0])])))
    assert np.array_equal(reference, np.asarray(image_grid(jnp.asarray(values)[None])))
    halved = np.asarray(image_grid(jnp.asarray(values, jnp.bfloat16)), np.int32)
    assert np.abs(halved - reference).max() <= 1


def test_small_images_are_enlarged_without_new_colours():
    checkers = np.indices((64, 64)).sum(0) % 2
    grid = np.asarray(
        image_grid(np.repeat(checkers[None, :, :, None], 3, axis=-1).astype(np.float32))
    )
    assert grid.shape[:2] == (192, 192)
    assert set(np.unique(grid[..., :3])) == {0, 255}


def test_a_large_image_keeps_its_size_and_several_share_the_page():
    assert image_grid(image(side=512)).size == (512, 512)
    assert image_grid(np.zeros((2, 512, 512, 3))).size == (516, 256)


def test_captions_stand_above_their_images_and_are_not_cut_off():
    long = "a medium orange triangle on a yellow background"
    grid = image_grid(image(0.0), captions=[long])
    plain = image_grid(image(0.0))
    assert grid.width == plain.width
    above = np.asarray(grid.convert("RGB"))[: grid.height - plain.height]
    assert above.shape[0] > 0
    assert above.min() < 100  # there is ink
    assert (above[:, -1] == 255).all()  # and none of it reaches the edge


def test_captions_of_a_wide_grid_can_be_read_on_a_page():
    heights = {}
    for columns in (4, 8, 40):
        pictures = np.zeros((columns, 64, 64, 3))
        captioned = image_grid(pictures, columns=columns, captions=["a"] * columns)
        heights[columns] = captioned.height - image_grid(pictures, columns=columns).height
    assert heights[4] < heights[8] == heights[40]


def test_a_caption_that_the_font_lacks_is_drawn_in_another_font_and_fits(monkeypatch):
    letters = "\N{MATHEMATICAL DOUBLE-STRUCK CAPITAL A}" * 30
    other = images.FONT_FILE.with_name("DejaVuSans.ttf")
    assert images.missing_letters(letters, ImageFont.truetype(images.FONT_FILE))
    monkeypatch.setattr(images, "FONTS_WITH_CHINESE", [("no-such-font.ttf", 0), (str(other), 0)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        grid = image_grid(image(0.0), captions=[letters])
        assert images.caption_font(letters).path == str(other)
    above = np.asarray(grid.convert("RGB"))[: grid.height - image_grid(image()).height]
    assert above.min() < 100
    assert (above[:, -1] == 255).all()


def test_a_caption_without_a_font_is_drawn_in_boxes_with_a_warning(monkeypatch):
    monkeypatch.setattr(images, "FONTS_WITH_CHINESE", [("no-such-font.ttf", 0)])
    with pytest.warns(UserWarning, match="No font here has '红心', so the captions show boxes"):
        image_grid(image(), captions=["红心 red 红心"])


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("a medium orange triangle on a yellow\nbackground", 2),
        ("medium" * 10, 3),
        ("a" * 5000, 193),
        ("黄色背景上的，橙色三角形。" * 4, 2),
    ],
)
def test_captions_break_between_words_or_signs_and_lose_nothing(text, lines):
    font = ImageFont.truetype(images.FONT_FILE, images.FONT_SIZE)
    wrapped = images.wrapped(text, font, 188).split("\n")
    assert len(wrapped) == lines
    assert all(font.getlength(line) <= 188 for line in wrapped)
    assert "".join(wrapped).replace(" ", "") == "".join(text.split())
    assert not any(line[0] in "，。" for line in wrapped)


def test_captions_must_match_the_images():
    with pytest.raises(ValueError, match="1 captions for 2 images"):
        image_grid(np.zeros((2, 64, 64, 3)), captions=["one"])


def test_pixels_that_are_not_numbers_are_refused_with_the_image():
    images = np.zeros((3, 64, 64, 3))
    images[1, 5, 5] = np.nan
    with pytest.raises(ValueError, match=r"3 value\(s\) are nan, in image\(s\) \[1\]"):
        image_grid(images)
    images[1, 5, 5] = np.inf
    with pytest.raises(ValueError, match=r"3 value\(s\) are inf"):
        image_grid(images)


@pytest.mark.parametrize("value", [-0.5, 1.5, 255.0])
def test_values_out_of_range_are_refused_with_the_range(value):
    images = np.zeros((1, 64, 64, 3))
    images[0, 0, 0, 0] = value
    low, high = min(value, 0), max(value, 0)
    with pytest.raises(ValueError, match=f"Values run from {low:.3g} to {high:.3g}"):
        image_grid(images)


@pytest.mark.parametrize("shape", [(64, 64, 3), (1, 64, 64), (1, 64, 64, 4), (1, 1, 1, 64, 64, 3)])
def test_wrong_ranks_and_channels_are_refused_with_the_shape(shape):
    with pytest.raises(ValueError, match=str(shape).replace("(", r"\(").replace(")", r"\)")):
        image_grid(np.zeros(shape))


@pytest.mark.parametrize("nothing", [[], np.zeros((0, 64, 64, 3))])
def test_no_images_are_refused(nothing):
    with pytest.raises(ValueError, match="no images"):
        image_grid(nothing)


def test_images_of_different_sizes_are_refused():
    with pytest.raises(ValueError, match=r"different sizes, \[\(8, 8\), \(9, 9\)\]"):
        image_grid([Image.new("RGB", (8, 8)), Image.new("RGB", (9, 9))])


def test_a_grid_is_no_wider_than_its_images():
    assert image_grid(image(), columns=10**6).size == image_grid(image()).size


def test_a_grid_without_columns_is_refused():
    with pytest.raises(ValueError, match="0 columns"):
        image_grid(image(), columns=0)
