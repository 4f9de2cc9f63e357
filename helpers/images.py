"""Pictures side by side."""

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

SMALLEST = 160  # pixels: a smaller picture is enlarged by a whole number, so that its pixels stay sharp squares
LARGEST = 256  # pixels: wider pictures are made smaller where there are several, so that a row fits on a page
GAP = 4
FONT_SIZE = 12
# Matplotlib's own font has the letters of most languages; Pillow's has few.
FONT_FILE = Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf")


def image_grid(images, columns: int | None = None, captions: Sequence[str] | None = None) -> Image.Image:
    """Lay pictures out in a grid, each under its caption.

    Parameters
    ----------
    images : array or sequence of PIL.Image.Image
        What pipelines return: an array of shape (devices, batch, height, width, 3) or (batch, height, width, 3), of any
        float dtype with values from 0 to 1, or uint8; or a list of PIL images of one size. Device by device, the
        pictures fill the grid row by row.
    columns : int, optional
        How many pictures a row holds; by default about as many as there are rows, and no more than eight.
    captions : sequence of str, optional
        One for each picture; long ones are wrapped.

    Returns
    -------
    PIL.Image.Image
        Pictures less than 160 pixels wide are enlarged by a whole number, without smoothing; several of more than 256
        are made smaller.

    Raises
    ------
    ValueError
        If there are no pictures, or the array has another rank, another number of channels, values that are not
        finite or lie outside 0 to 1; or if captions or columns do not fit.

    Examples
    --------
    >>> image_grid(np.zeros((8, 1, 64, 64, 3))).size
    (780, 388)
    """
    pictures = [Image.fromarray(picture) for picture in _as_uint8(images)]
    if captions is not None and len(captions) != len(pictures):
        raise ValueError(f"There are {len(captions)} captions for {len(pictures)} pictures: give one for each.")
    if columns is None:
        columns = min(8, len(pictures), max(math.ceil(math.sqrt(len(pictures))), min(4, len(pictures))))
    if columns < 1:
        raise ValueError(f"A grid of {columns} columns holds no pictures: give at least 1.")

    width, height = pictures[0].size
    resampling = Image.Resampling.NEAREST
    if width < SMALLEST:
        factor = math.ceil(SMALLEST / width)
        width, height = width * factor, height * factor
    elif width > LARGEST and len(pictures) > 1:
        width, height = LARGEST, round(height * LARGEST / width)
        resampling = Image.Resampling.LANCZOS
    font = ImageFont.truetype(FONT_FILE, FONT_SIZE)
    wrapped = [_wrap(text, width, font) for text in captions or []]
    line = FONT_SIZE + 3
    room = line * max((len(lines) for lines in wrapped), default=0)

    rows = math.ceil(len(pictures) / columns)
    # Transparent between the pictures, so that the grid sits on a dark page as well as on a light one; captions stand
    # on white.
    grid = Image.new("RGBA", (columns * (width + GAP) - GAP, rows * (height + room + GAP) - GAP))
    draw = ImageDraw.Draw(grid)
    for number, picture in enumerate(pictures):
        left, top = number % columns * (width + GAP), number // columns * (height + room + GAP)
        grid.paste(picture.resize((width, height), resampling), (left, top + room))
        if captions:
            draw.rectangle((left, top, left + width - 1, top + room - 1), fill="white")
            lines = wrapped[number]
            for k, text in enumerate(lines):
                draw.text((left + 2, top + room - line * (len(lines) - k)), text, fill="black", font=font)
    return grid


def _wrap(text: str, width: int, font: ImageFont.FreeTypeFont) -> list[str]:
    # The words of one line may be wider than the average of the text.
    letter = 1.08 * font.getlength(text) / max(len(text), 1)
    return textwrap.wrap(text, max(int((width - 4) / max(letter, 1)), 1)) or [""]


def _as_uint8(images) -> np.ndarray:
    """Check the pictures and bring them to uint8 of shape (count, height, width, 3)."""
    if isinstance(images, (list, tuple)) and images and all(isinstance(image, Image.Image) for image in images):
        sizes = {image.size for image in images}
        if len(sizes) > 1:
            raise ValueError(f"The pictures have different sizes, {sorted(sizes)}: bring them to one.")
        images = np.stack([np.asarray(image.convert("RGB")) for image in images])
    array = np.asarray(images)
    if array.size == 0:
        raise ValueError(f"There are no pictures in an array of shape {array.shape}.")
    if array.ndim not in (4, 5) or array.shape[-1] != 3:
        raise ValueError(
            f"Pictures come as (devices, batch, height, width, 3) or (batch, height, width, 3), not as {array.shape}."
        )
    array = array.reshape(-1, *array.shape[-3:])
    if array.dtype == np.uint8:
        return array
    # bfloat16 is no dtype of NumPy's own, and has too few digits for the multiplication below.
    array = array.astype(np.float32)
    if not np.isfinite(array).all():
        where = np.flatnonzero(~np.isfinite(array).all(axis=(1, 2, 3))).tolist()
        count = int((~np.isfinite(array)).sum())
        raise ValueError(
            f"{count} value(s) are {array[~np.isfinite(array)][0]}, in picture(s) {where}: the numbers went wrong in "
            "the pipeline, for example in a scheduler whose state was cast to bfloat16."
        )
    low, high = float(array.min()), float(array.max())
    if low < 0 or high > 1:
        raise ValueError(
            f"Values run from {low:.3g} to {high:.3g}, but pictures have 0 to 1: divide by 255 if they are bytes, or "
            "use (x / 2 + 0.5).clip(0, 1) if they come straight from the decoder."
        )
    return np.rint(array * 255).astype(np.uint8)
