"""Photos and their captions, as people have them in a folder.

Whose layouts of captions are read, ``python -m course.finetune --help`` says.
"""

import csv
import io
import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image, ImageCms, ImageOps

# By the formats that Pillow may open, whatever a file is called: those of them that start other
# programs, as EPS does, are not among them.
ENDINGS = {
    "PNG": (".png",),
    "JPEG": (".jpg", ".jpeg", ".jfif"),
    "WEBP": (".webp",),
    "BMP": (".bmp",),
    "TIFF": (".tif", ".tiff"),
    "AVIF": (".avif",),
    "GIF": (".gif",),
}
TABLES = ("metadata.jsonl", "metadata.csv")  # of captions
# Other programs have them in these, too.
ALL_TABLES = re.compile(r"(metadata|captions?|meta_(cap|lat|clean))\.(json|jsonl|csv|tsv|parquet)")
WANTED = '{"file_name": "a.png", "text": "a caption"}'
LARGEST_TEXT = 10**8  # bytes, for millions of captions
# Bytes. Pillow reads WebP and AVIF whole, and refuses 179 million pixels, which have 0.7 GB.
LARGEST_PICTURE = 10**9
HEIC = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"mif1", b"msf1")  # behind a file's "ftyp"


def read_folder(
    folder: str | Path, height: int, width: int, caption: str | None = None
) -> tuple[np.ndarray, list[str]]:
    """Read a folder of pictures with captions.

    Hidden files are left out, such as those that macOS puts beside others on foreign disks.
    A picture of a different size is scaled until it covers what is asked for, and its middle is
    taken. How many lose an edge or are enlarged by that is printed.

    Parameters
    ----------
    folder : str or Path
        With captions in ``metadata.jsonl``, where each line is an object with ``file_name`` and
        ``text``, or in ``metadata.csv``, which has columns of these names. Without such a file, the
        caption of ``a.jpg`` is in ``a.txt`` or ``a.caption``.
    height, width : int
        Of all images, in pixels.
    caption : str, optional
        Of the pictures that have none of their own.

    Returns
    -------
    tuple of numpy.ndarray and list of str
        Images from 0 to 1, float32, (images, height, width, 3), and a caption for each.

    Raises
    ------
    FileNotFoundError, ValueError
        If there are no pictures, one cannot be read or has no caption, or a caption has no picture.
    """
    captions = _read_captions(Path(folder), caption)
    return _read_images(Path(folder), list(captions), height, width), list(captions.values())


def _read_captions(folder: Path, caption: str | None) -> dict[str, str]:
    """Return the caption of each picture by its name; errors are those of ``read_folder``."""
    names = _find_images(folder)
    table = _find_table(folder)
    if table:
        captions = _read_table(table)
        advice = f"{table.name} must have a line for each image, and no other"
    else:
        captions = _read_texts(folder, names)
        advice = (
            "write one into a .txt file of the same name, or give one for all by --caption or, of "
            "rehearsed pictures, --rehearse-caption"
        )
    for name in names:
        if captions.get(name) is None:
            if caption is None:
                raise ValueError(f"{folder / name} has no caption: {advice}.")
            captions[name] = caption
    for name, text in captions.items():
        if name not in names:
            raise ValueError(f"{folder / name} is not there: {advice}.")
        if not text:
            raise ValueError(f"The caption of {folder / name} is empty: write what one sees.")
    return captions


def read_references(
    folder: str | Path,
    photos: str | Path,
    height: int,
    width: int,
    caption: str | None = None,
) -> np.ndarray:
    """Read what the pictures of another folder are edits of, in the order of ``read_folder``.

    Parameters
    ----------
    folder : str or Path
        With a picture for each of ``photos``, of the same name; only endings may differ.
    photos, height, width, caption
        As ``read_folder`` takes them.

    Returns
    -------
    numpy.ndarray
        From 0 to 1, float32, (images, height, width, 3).

    Raises
    ------
    FileNotFoundError, ValueError
        If one is missing or cannot be read, or it is not clear which one is meant.
    """
    folder, photos = Path(folder), Path(photos)
    by_stem = {}
    for name in _find_images(folder):
        by_stem.setdefault(Path(name).stem, []).append(name)
    chosen = []
    for name in _read_captions(photos, caption):
        match by_stem.get(Path(name).stem, []):
            case [reference]:
                chosen.append(reference)
            case []:
                raise ValueError(
                    f"{photos / name} is an edit of nothing: {folder} has no picture of its name."
                )
            case [first, second, *_]:
                raise ValueError(
                    f"{photos / name} may be an edit of {first} or of {second} in {folder}: leave "
                    "one there."
                )
    return _read_images(folder, chosen, height, width)


def _find_images(folder: Path) -> list[str]:
    """Return the names of a folder's pictures, sorted."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no folder: give one with pictures.")
    names = sorted(file.name for file in folder.glob("[!.]*"))
    for name in names:
        if name.lower().endswith((".heic", ".heif")):
            raise ValueError(f"{folder / name} is a HEIC photo: export it as JPEG.")
    endings = tuple(ending for some in ENDINGS.values() for ending in some)
    images = [name for name in names if name.lower().endswith(endings)]
    if not images:
        for file in sorted(folder.glob("*/*")):
            if file.name.lower().endswith(endings):
                raise FileNotFoundError(
                    f"{folder} has no images, and {file.parent} has some: give that."
                )
        raise FileNotFoundError(f"{folder} has no images: put some there, as {', '.join(endings)}.")
    return images


def _find_table(folder: Path) -> Path | None:
    """Return the file with all captions of a folder, if it has one in a form that is read."""
    tables = sorted(file for file in folder.iterdir() if ALL_TABLES.fullmatch(file.name))
    if not tables:
        return None
    if len(tables) > 1 or tables[0].name not in TABLES:
        names = " and ".join(file.name for file in tables)
        raise ValueError(
            f"{folder} has captions in {names}: write them into metadata.jsonl, as {WANTED}, and "
            "take out what else there is."
        )
    return tables[0]


def _read_images(folder: Path, names: list[str], height: int, width: int) -> np.ndarray:
    """Read pictures at a size, and print how many lose an edge or are enlarged."""
    cropped, enlarged, images = 0, 0, []
    for name in names:
        image = open_image(folder / name)
        cropped += image.width * height != image.height * width
        enlarged += image.width < width or image.height < height
        images.append(fit_image(image, height, width))
    if cropped:
        print(
            f"{cropped} of {len(images)} images in {folder} have another shape than "
            f"{width} × {height}: the middle of each is taken."
        )
    if enlarged:
        print(f"{enlarged} of {len(images)} images in {folder} are small, and enlarged.")
    return np.stack(images)


def _read_table(file: Path) -> dict[str, str]:
    """Read the caption of each image by the name of its file, out of JSON lines or CSV."""
    captions = {}
    for place, entry in _read_entries(file):
        try:
            name, caption = entry["file_name"], entry["text"].strip()
        except (KeyError, TypeError, AttributeError):
            name = None
        if not isinstance(name, str):
            shown = repr(entry)[:80]
            raise ValueError(f"{place} of {file} is {shown}: write it as {WANTED}.")
        if name in captions:
            raise ValueError(f"{place} of {file} is the second one of {name}: leave one there.")
        captions[name] = caption
    return captions


def _read_entries(file: Path) -> Iterator[tuple[str, object]]:
    """Yield what a table of captions has, each with where it stands."""
    text = _read_text(file)
    if file.suffix == ".csv":
        try:
            table = csv.DictReader(io.StringIO(text, newline=""))
            for name in ("file_name", "text"):
                if (table.fieldnames or []).count(name) > 1:
                    raise ValueError(f"Two columns of {file} are called {name}: take one out.")
            for number, row in enumerate(table, 1):
                yield f"Row {number}", row
        except csv.Error as error:
            raise ValueError(f"{file} is damaged, or no CSV: {error}. Write it anew.") from None
        return
    # Not splitlines, which takes some signs within a line for its end.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield f"Line {number}", json.loads(line)
            except (json.JSONDecodeError, RecursionError):
                yield f"Line {number}", line


def _read_texts(folder: Path, names: list[str]) -> dict[str, str | None]:
    """Read each image's caption: the lines of the text file beside it, joined, or None."""
    captions = {}
    for name in names:
        both = (folder / name).with_suffix(".txt"), (folder / name).with_suffix(".caption")
        texts = [file for file in both if file.is_file()]
        if len(texts) > 1:
            raise ValueError(f"{texts[0]} and {texts[1]} are for one image: take one out.")
        captions[name] = " ".join(_read_text(texts[0]).split()) if texts else None
    return captions


def _read_text(file: Path) -> str:
    if not file.is_file():
        raise ValueError(f"{file} is no file: take it out.")
    if file.stat().st_size > LARGEST_TEXT:
        raise ValueError(f"{file} has {file.stat().st_size / 1e6:.0f} MB, too many for captions.")
    try:
        return file.read_text(encoding="utf-8-sig")  # Windows may write a mark in front
    except UnicodeDecodeError:
        raise ValueError(f"{file} is not in UTF-8: save it as that.") from None


def open_image(file: Path) -> Image.Image:
    """Read an image in RGB: the right way up, and on white where it is transparent.

    Of a film, it is the first image.
    """
    if not file.is_file():
        raise ValueError(f"{file} is no file, or a link to nothing: take it out.")
    if file.stat().st_size > LARGEST_PICTURE:
        size = file.stat().st_size / 1e6
        raise ValueError(f"{file} has {size:.0f} MB, which no picture has: take it out.")
    try:
        with warnings.catch_warnings():
            # A photo of 100 million pixels is fine; of twice as many, Pillow raises an error.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(file, formats=[*ENDINGS])
        with image:
            image.load()
        ImageOps.exif_transpose(image, in_place=True)  # as the camera was held
    except Image.DecompressionBombError as error:
        raise ValueError(f"{file} is too large: {error} Make it smaller.") from None
    except Exception:  # Pillow's readers raise errors of many kinds
        if _is_heic(file):
            raise ValueError(f"{file} is a HEIC photo: export it as JPEG.") from None
        raise ValueError(
            f"{file} is damaged, or no image in {', '.join(ENDINGS)}: get it again as one of these."
        ) from None
    if image.mode.startswith("I"):  # 16 bits of grey, which Pillow would cut off at 255
        grey = np.asarray(image, np.float32) / 257
        if grey.min() >= 0 and grey.max() <= 255:
            return Image.fromarray(np.uint8(grey.round())).convert("RGB")
    if image.mode[0] in "IF":
        raise ValueError(f"{file} has numbers of 32 bits: export it as JPEG.")
    profile = image.info.get("icc_profile")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGB", image.size, "white")
        white.paste(image, mask=image.getchannel("A"))
        image = white
    return _to_srgb(image, profile)


def _to_srgb(image: Image.Image, profile: bytes | None) -> Image.Image:
    """Return an image in RGB, with the colours that its profile means, if it has one.

    Phones save wider colours, and programs for print CMYK. A profile that is damaged, or not for
    this kind of image, is left out, as browsers do.
    """
    if image.mode not in ("L", "CMYK"):
        image = image.convert("RGB")
    if profile:
        try:
            own = ImageCms.ImageCmsProfile(io.BytesIO(profile))
            srgb = ImageCms.createProfile("sRGB")
            return ImageCms.profileToProfile(image, own, srgb, outputMode="RGB")
        except (ImageCms.PyCMSError, OSError):
            pass
    return image.convert("RGB")


def _is_heic(file: Path) -> bool:
    """Say whether a file is a photo as iPhones save it, whatever it is called."""
    if not file.is_file():
        return False
    with file.open("rb") as opened:
        start = opened.read(12)
    return start[4:8] == b"ftyp" and start[8:] in HEIC


def fit_image(image: Image.Image, height: int, width: int) -> np.ndarray:
    """Return an image's middle, scaled; colours from 0 to 1, float32, (height, width, 3)."""
    if image.size != (width, height):
        image = ImageOps.fit(image, (width, height), Image.Resampling.LANCZOS)
    return np.asarray(image, np.float32) / 255
