"""Images side by side."""

import math
import re
import warnings
from collections.abc import Sequence
from pathlib import Path

import jax
import matplotlib
import numpy as np
from matplotlib.ft2font import FT2Font
from PIL import Image, ImageDraw, ImageFont

# In pixels. A narrower image is enlarged by a whole number, so that its pixels stay sharp squares;
# if there are several, wider ones are made smaller, so that a row fits on a page.
SMALLEST = 160
LARGEST = 256
GAP = 4
FONT_SIZE = 12
# Matplotlib's fonts have the letters of most languages; Pillow's has few.
FONT_FILE = Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSansMono.ttf")
# It has no Chinese, Japanese or Korean signs. These have them: the names of their files on Linux,
# Windows and macOS, each with the number of the face in the file. Pillow looks for them where the
# system keeps its fonts.
FONTS_WITH_CHINESE = (
    ("NotoSansCJK-Regular.ttc", 2),  # 2 has the forms of simplified Chinese
    ("NotoSansSC-Regular.otf", 0),
    ("SourceHanSansSC-Regular.otf", 0),
    ("wqy-microhei.ttc", 0),
    ("wqy-zenhei.ttc", 0),
    ("DroidSansFallbackFull.ttf", 0),
    ("msyh.ttc", 0),
    ("simhei.ttf", 0),
    ("PingFang.ttc", 0),
    ("Hiragino Sans GB.ttc", 0),
    ("STHeiti Light.ttc", 0),
    ("Arial Unicode.ttf", 0),
)
# A caption's lines end between these: spaces, words, and Chinese signs with what may not begin a
# line.
PIECES = re.compile(r"\s|[^\s\u2e80-\uffff]+|[\u2e80-\uffff][，。、；：！？）》]*")

Images = jax.Array | np.ndarray | Sequence[Image.Image]


def image_grid(
    images: Images, columns: int | None = None, captions: Sequence[str] | None = None
) -> Image.Image:
    """Lay images out in a grid, each under its caption.

    Parameters
    ----------
    images : array or sequence of PIL.Image.Image
        What pipelines return: an array of shape (devices, batch, height, width, 3) or (batch,
        height, width, 3), of any float dtype with values from 0 to 1, or uint8; or a list of PIL
        images of one size. Device by device, the images fill the grid row by row.
    columns : int, optional
        How many images a row holds at most; by default four, which can still be read on a page.
    captions : sequence of str, optional
        One for each image; long ones are wrapped. Chinese ones are drawn in a font of the system;
        where it has none, a warning says so, and boxes stand for the signs.

    Returns
    -------
    PIL.Image.Image
        Images less than 160 pixels wide are enlarged by a whole number, without smoothing; several
        of more than 256 are made smaller.

    Raises
    ------
    ValueError
        If there are no images, or the array has a different rank or number of channels, or values
        that are not finite or lie outside 0 to 1; or if captions or columns do not fit.

    Examples
    --------
    >>> image_grid(np.zeros((8, 1, 64, 64, 3))).size
    (780, 388)
    """
    tiles = [Image.fromarray(image) for image in _as_uint8(images)]
    count = len(tiles)
    if captions is not None and len(captions) != count:
        raise ValueError(
            f"There are {len(captions)} captions for {count} images: give one for each."
        )
    if columns is None:
        columns = min(4, count)
    if columns < 1:
        raise ValueError(f"A grid of {columns} columns holds no images: give at least 1.")

    columns = min(columns, count)

    width, height = tiles[0].size
    resampling = Image.Resampling.NEAREST
    if width < SMALLEST:
        factor = math.ceil(SMALLEST / width)
        width, height = width * factor, height * factor
    elif width > LARGEST and count > 1:
        width, height = LARGEST, round(height * LARGEST / width)
        resampling = Image.Resampling.LANCZOS
    # A page shows a grid of more columns at a smaller scale, and its captions have to be read, too.
    font = caption_font("".join(captions or []), round(FONT_SIZE * min(max(columns / 4, 1), 2)))
    line = sum(font.getmetrics())
    texts, room = [""] * count, 0  # room is the height of the highest caption
    if captions is not None:
        texts = [wrapped(caption, font, width - 4) for caption in captions]
        room = line * max(text.count("\n") + 1 for text in texts)

    # Transparent between the images, so that the grid sits on a dark page as well as on a light
    # one; captions stand on white.
    rows = math.ceil(count / columns)
    grid = Image.new("RGBA", (columns * (width + GAP) - GAP, rows * (height + room + GAP) - GAP))
    draw = ImageDraw.Draw(grid)
    for number, (tile, text) in enumerate(zip(tiles, texts, strict=True)):
        row, column = divmod(number, columns)
        left, top = column * (width + GAP), row * (height + room + GAP)
        grid.paste(tile.resize((width, height), resampling), (left, top + room))
        if captions is not None:
            draw.rectangle((left, top, left + width - 1, top + room - 1), fill="white")
            start = top + room - line * (text.count("\n") + 1)
            # Pillow begins a line so far below the one before it, and the height of an A.
            spacing = line - font.getbbox("A")[3]
            draw.multiline_text((left + 2, start), text, fill="black", font=font, spacing=spacing)
    return grid


def caption_font(text: str, size: int = FONT_SIZE) -> ImageFont.FreeTypeFont:
    """Choose the font in which a text is drawn.

    Parameters
    ----------
    text : str
        All captions of a grid, which are drawn in one font.
    size : int
        In pixels.

    Returns
    -------
    PIL.ImageFont.FreeTypeFont
        Matplotlib's own, if it has all letters of the text; if not, the first font of this system
        that has them. If there is none, Matplotlib's, with a warning.
    """
    font = ImageFont.truetype(FONT_FILE, size)
    missing = missing_letters(text, font)
    if not missing:
        return font
    for name, face in FONTS_WITH_CHINESE:
        try:
            other = ImageFont.truetype(name, size, index=face)
        except OSError:
            continue  # this system does not have it
        if not missing_letters(text, other):
            return other
    warnings.warn(
        f"No font here has {''.join(missing)!r}, so the captions show boxes for it: install one, "
        "such as Noto Sans CJK (on Debian, Ubuntu and Colab: `apt-get install fonts-noto-cjk`), "
        "and draw the grid again.",
        stacklevel=3,
    )
    return font


def missing_letters(text: str, font: ImageFont.FreeTypeFont) -> list[str]:
    """List the letters of a text that a font lacks, each once, in their order."""
    has = FT2Font(str(font.path)).get_charmap()
    return [letter for letter in dict.fromkeys(text) if letter != "\n" and ord(letter) not in has]


def wrapped(text: str, font: ImageFont.FreeTypeFont, width: int) -> str:
    """Break a text into lines of at most so many pixels."""
    lines, line = [], ""
    for piece in PIECES.findall(" ".join(text.split())):
        if line and font.getlength(line + piece) > width:
            lines.append(line.rstrip())
            line = ""
        line = (line + piece).lstrip()
        while font.getlength(line) > width:  # a word that is longer than a line
            fits = 1
            while font.getlength(line[: fits + 1]) <= width:
                fits += 1
            lines.append(line[:fits])
            line = line[fits:]
    return "\n".join([*lines, line.rstrip()])


def _as_uint8(images: Images) -> np.ndarray:
    """Check the images and bring them to uint8 of shape (count, height, width, 3)."""
    if isinstance(images, (list, tuple)) and images and isinstance(images[0], Image.Image):
        sizes = {image.size for image in images}
        if len(sizes) > 1:
            raise ValueError(
                f"The images have different sizes, {sorted(sizes)}: bring them to one."
            )
        images = np.stack([np.asarray(image.convert("RGB")) for image in images])
    array = np.asarray(images)
    if array.size == 0:
        raise ValueError(f"There are no images in an array of shape {array.shape}.")
    if array.ndim not in (4, 5) or array.shape[-1] != 3:
        raise ValueError(
            "Images come as (devices, batch, height, width, 3) or (batch, height, width, 3), not "
            f"as {array.shape}."
        )
    array = array.reshape(-1, *array.shape[-3:])
    if array.dtype == np.uint8:
        return array
    # NumPy itself does not know bfloat16, which has too few digits for the multiplication below.
    array = array.astype(np.float32)
    finite = np.isfinite(array)
    if not finite.all():
        which = np.flatnonzero(~finite.all(axis=(1, 2, 3))).tolist()
        raise ValueError(
            f"{(~finite).sum()} value(s) are {array[~finite][0]}, in image(s) {which}: the numbers "
            "went wrong in the pipeline, for example in a scheduler whose state was cast to "
            "bfloat16."
        )
    low, high = array.min(), array.max()
    if low < 0 or high > 1:
        raise ValueError(
            f"Values run from {low:.3g} to {high:.3g}, but images have 0 to 1: divide by 255 if "
            "they are bytes, or use (x / 2 + 0.5).clip(0, 1) if they come straight from the "
            "decoder."
        )
    return np.rint(array * 255).astype(np.uint8)
