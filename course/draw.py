"""Draw many prompts on many machines: ``python -m course.draw PROMPTS OUT``.

PROMPTS is a text file with a prompt on each line; or CSV, TSV or Parquet with a column ``prompt``;
or JSON lines with a key of this name. OUT gets an image for each, with the prompt, the key and the
settings in it, and ``settings.json``. Started again, the same command draws what is missing.

With ``--edit FOLDER``, prompts say what to change in pictures: each row of PROMPTS names its own in
that folder in a column, or under a key, ``file_name``. FLUX.2-klein edits; Stable Diffusion cannot.

Ray Data spreads the prompts over *actors*: processes that load the model once and then draw one
batch after another. On this machine Ray starts by itself. On a cluster, give ``--address auto`` and
an OUT that all machines see. If an actor dies, Ray starts it anew and gives it its batch again. The
key of an image comes from its number, so it is the same image whoever draws it.
"""

import argparse
import contextlib
import csv
import io
import json
import logging
import os
import re
import reprlib
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from course.commands import (
    ending_as_ctrl_c,
    finite,
    is_out_of_memory,
    make_parser,
    positive,
    run,
    seconds,
    writing_to,
)
from course.families import CODE, find_code
from course.finetune.photos import fit_image, open_image
from course.model.files import read_json, read_text, write_bytes
from course.model.tokens import say_what_is_plain_text
from helpers.checkpoints import CHECKPOINT_VARIABLE, Checkpoint, download, read_checkpoint
from helpers.inputs import check_seed, create_key, say_what_is_unknown
from helpers.models import NO_WEIGHTS, bundled_names, find_local

Rows = dict[str, np.ndarray]  # columns, one entry for each image

# Ray reads this when it is imported. Of a process that died it would print lines of 800 letters.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")

INSTALL = 'pip install "ray[data]"'
PATIENCE = 1800  # seconds without any image after which to give up: a large model has to load
SETTINGS_FILE = "settings.json"
SHOWN = 5  # warnings about prompts; of the others, their number
MOST_ROWS = 10**7  # of a file with prompts, so that none can fill the memory
MOST_TEXT = 10**9  # letters of all its prompts
MOST_LETTERS = 200  # of a warning, which may quote a prompt of any length


@dataclass(frozen=True)
class Settings:
    """What the images of a call follow from, besides their prompts and numbers.

    A seed that is out of range raises ``ValueError``, and so does a guidance that is not finite.
    """

    checkpoint: str  #: as ``TUTORIAL_CHECKPOINT`` takes it
    seed: int = 0
    steps: int = 15
    guidance: float = 3.0
    batch: int = 4  #: how many images an actor draws at a time

    def __post_init__(self) -> None:
        check_seed(self.seed)
        if not np.isfinite(self.guidance):
            raise ValueError(f"The guidance is {self.guidance}: give a finite number.")

    def texts(self) -> dict[str, str]:
        """Return what is written into each image."""
        names = ("checkpoint", "seed", "steps", "guidance")
        return {name: str(getattr(self, name)) for name in names}


class Draw:
    """An actor: it loads the model once, then draws and writes each batch that it gets."""

    def __init__(self, settings: Settings, write: Callable[[Rows], None]) -> None:
        self.settings, self.write = settings, write
        mesh = Mesh(np.array(jax.local_devices()), ("data",))
        self.split, everywhere = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
        self.size = -(-settings.batch // mesh.size) * mesh.size  # what the devices can share
        code, self.params, self.config, self.tokenize = load_model(settings, everywhere)
        self.draw = code.make_drawing(self.config, self.tokenize, settings.steps, settings.guidance)

    def __call__(self, rows: Rows) -> Rows:
        start, count = time.time(), len(rows["number"])
        # The last batch is filled up with repetitions, so that one program draws them all.
        filled = np.resize(np.arange(count), self.size)
        texts = self.tokenize(list(rows["prompt"][filled]))
        keys = image_keys(self.settings.seed, rows["number"][filled])
        to_edit = None
        if "picture" in rows:
            side = self.config.side
            pictures = [fit_image(open_image(Path(file)), side, side) for file in rows["picture"]]
            to_edit = np.stack(pictures)[filled]
        texts, keys, to_edit = jax.device_put((texts, keys, to_edit), self.split)
        with explaining_memory(self.size):
            images = np.asarray(self.draw(self.params, texts, keys, to_edit))[:count]
        self.write(rows | {"image": to_bytes(images)})
        worker = f"process {os.getpid()} on {socket.gethostname()}"
        about = {"worker": worker, "start": start, "end": time.time()}
        return rows | {name: np.full(count, about[name]) for name in about}


def draw_rows(
    rows: list[dict], settings: Settings, write: Callable[[Rows], None], actors: int, **each: Any
) -> Any:
    """Return the pipeline: prompts go to actors, which draw and write.

    Parameters
    ----------
    rows : list of dict
        Each has a ``number`` and a ``prompt``, and what `add_pictures` adds if they edit.
    settings : Settings
        What to draw with.
    write : callable
        It writes the images of a batch.
    actors : int
        How many.
    **each
        What each actor takes, in Ray's words: ``num_cpus=1`` or ``resources={"TPU": 4}``.

    Returns
    -------
    ray.data.Dataset
        Number, prompt, worker, start and end of each image. Ray begins when somebody asks for it.
    """
    ray = import_ray()
    batches = -(-len(rows) // settings.batch)
    return ray.data.from_items(rows, override_num_blocks=batches).map_batches(
        Draw,
        fn_constructor_args=(settings, write),
        batch_size=settings.batch,
        compute=ray.data.ActorPoolStrategy(size=actors),
        **each,
    )


def image_keys(seed: int, numbers: np.ndarray) -> jax.Array:
    """Return the key of each image, of shape (images,), from the seed and its number alone."""
    fold_in = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    return fold_in(create_key(seed), jnp.asarray(numbers, jnp.uint32))


def to_bytes(images: np.ndarray) -> np.ndarray:
    """Return images as uint8 from float32 from 0 to 1; ``RuntimeError`` if one is not finite."""
    if not np.isfinite(images).all():
        raise RuntimeError("An image has values that are not finite: the numbers went wrong.")
    return np.uint8(np.round(255 * images))


def load_model(settings: Settings, sharding: jax.sharding.Sharding) -> tuple:
    """Load code, parameters, configuration and tokenizer of the model, on an actor's machine."""
    # What one actor of a machine has compiled, the others and those after it need not.
    if not jax.config.jax_compilation_cache_dir:
        folder = Path.home() / ".cache" / "stable-diffusion-jax-course"
        jax.config.update("jax_compilation_cache_dir", str(folder))
    try:
        checkpoint = read_checkpoint(settings.checkpoint)
        folder = download(checkpoint)
        code = find_code(folder)
        return code, *code.load(folder, checkpoint.dtype, sharding)
    except (OSError, ValueError, RuntimeError) as error:
        raise RuntimeError(
            f"The actor on {socket.gethostname()} cannot load {settings.checkpoint}: {error}"
        ) from None


@contextlib.contextmanager
def explaining_memory(batch: int) -> Iterator[None]:
    """Name the batch if there is not enough memory for it."""
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise RuntimeError(
            f"{batch} images at a time need more memory than {jax.local_devices()[0]} of "
            f"{socket.gethostname()} has: give a --batch below {batch}."
        ) from None


# What goes in.


def read_prompts(file: Path) -> list[dict]:
    """Read the prompts of a file, with the numbers of their lines or rows, from 0.

    A text file has one on each line. In CSV, TSV and Parquet they are in the column ``prompt``, and
    in JSON lines under the key ``prompt``. Empty ones are left out, and the others keep their
    numbers.

    Raises
    ------
    RuntimeError
        If the file cannot be read, or has no prompts.
    """
    rows = []
    for number, prompt in enumerate(read_column(file, "prompt")):
        if prompt and prompt.strip():
            rows.append({"number": number, "prompt": prompt.strip()})
    if not rows:
        raise RuntimeError(f"There are no prompts in {file}: write one on each line.")
    return rows


def add_pictures(rows: list[dict], file: Path, folder: Path) -> list[dict]:
    """Return the rows with the pictures that they edit: where they are, and their hashes.

    Raises
    ------
    RuntimeError
        If a row names no picture, or there is none that can be read.
    """
    names = read_column(file, "file_name")
    edits, hashes = [], {}
    for row in rows:
        name = (names[row["number"]] or "").strip()
        if not name:
            raise RuntimeError(
                f"Row {row['number']} of {file} names no picture: write the one to edit into its "
                "file_name."
            )
        picture = (folder / name).absolute()
        try:
            is_there = picture.is_file()
        except OSError:  # that is no name of a file, but a text of more letters
            is_there = False
        if not is_there:
            raise RuntimeError(
                f"Row {row['number']} of {file} edits {folder / shorten(name)}, which is not "
                "there: correct the name, or --edit."
            )
        if not picture.resolve().is_relative_to(folder.resolve()):
            raise RuntimeError(
                f"Row {row['number']} of {file} edits {picture}, which is outside of {folder}: put "
                "it there, or correct --edit."
            )
        if picture not in hashes:  # many rows may edit one
            try:
                open_image(picture)
            except ValueError as error:
                raise RuntimeError(str(error)) from None
            hashes[picture] = sha256(picture.read_bytes()).hexdigest()[:16]
        edits.append(row | {"picture": str(picture), "edited": f"{name} {hashes[picture]}"})
    return edits


def read_column(file: Path, name: str) -> list[str | None]:
    """Read what stands in the rows of a file under a name, which text files have not.

    Raises
    ------
    RuntimeError
        If the file cannot be read, or has no such column, or no texts in it.
    """
    cells, letters = [], 0
    try:
        for number, cell in enumerate(_read_cells(file, name)):
            if not isinstance(cell, str | None):
                shown = reprlib.repr(cell)
                raise RuntimeError(f"The prompts in {file} are no texts: row {number} is {shown}.")
            letters += len((cell or "").encode())  # which half of a sign in JSON has no bytes for
            if number >= MOST_ROWS or letters > MOST_TEXT:
                raise ValueError(
                    f"it has more than {MOST_ROWS} rows or {MOST_TEXT} letters, so split it"
                )
            cells.append(cell)
    except (OSError, ValueError, KeyError, RecursionError, csv.Error) as error:
        raise RuntimeError(f"The prompts in {file} cannot be read: {error}.") from None
    return cells


def _read_cells(file: Path, name: str) -> Iterator[Any]:
    """Yield what stands under a name in each row; an error if a file has no such place."""
    suffix = file.suffix.lower()
    if suffix == ".parquet":
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(file) as table:
            if name not in table.schema_arrow.names:
                raise ValueError(f"its columns are {table.schema_arrow.names}, not {name!r}")
            if table.metadata.num_rows > MOST_ROWS:
                raise ValueError(f"it has {table.metadata.num_rows} rows, so split it")
            for batch in table.iter_batches(256, columns=[name]):  # a row may be large
                yield from batch[name].to_pylist()
        return
    if suffix in (".json", ".xlsx", ".xls", ".ods", ".yaml", ".yml"):
        raise ValueError(f"{suffix} is not read, so save them as .txt, .csv, .jsonl or .parquet")
    with file.open(encoding="utf-8-sig") as stream:
        text = stream.read(MOST_TEXT + 1)  # as a pipe or a device may have no end
    if len(text) > MOST_TEXT:
        raise ValueError(f"it has more than {MOST_TEXT} letters, so split it")
    if suffix in (".csv", ".tsv"):
        table = csv.DictReader(io.StringIO(text, newline=""), delimiter=",\t"[suffix == ".tsv"])
        if name not in (table.fieldnames or ()):
            raise ValueError(f"its columns are {table.fieldnames}, and none is called {name!r}")
        if table.fieldnames.count(name) > 1:
            raise ValueError(f"two of its columns are called {name!r}, so take one out")
        for row in table:
            yield row[name]
        return
    # Not splitlines, which takes some signs within a line for its end.
    lines = text.split("\n")
    if suffix not in (".jsonl", ".ndjson"):
        if name != "prompt":
            raise ValueError(f"lines of a text have no {name}, so write them as .csv or .jsonl")
        yield from lines
        return
    for number, line in enumerate(lines):
        entry = json.loads(line) if line.strip() else {name: ""}
        if not isinstance(entry, dict) or name not in entry:
            raise ValueError(f"line {number + 1} has no key {name!r}")
        yield entry[name]


def find_warnings(
    rows: list[dict],
    say_what_is_lost: Callable[[str, str], str | None],
    words: list[str] | None,
) -> Iterator[str]:
    """Yield what will not be drawn: ends of long prompts, words that a checkpoint never saw …"""
    for row in rows:
        name = f"Prompt {row['number']}"
        prompt = row["prompt"]
        too_long = say_what_is_lost(prompt, name)
        if too_long:
            yield too_long
        plain = say_what_is_plain_text(prompt, prompt=name)
        if plain:
            yield plain
        unknown = say_what_is_unknown(prompt, words) if words is not None else None
        if unknown:
            yield f"{name}: {unknown}"


def warn_about_prompts(rows: list[dict], checkpoint: Checkpoint) -> None:
    """Print the first of the warnings, and how many more there are."""
    folder = download(checkpoint, only=NO_WEIGHTS)
    words = read_json(folder / "tokenizer" / "tokenizer_config.json").get("caption_words")
    code = CODE[checkpoint.model]
    tokenize = code.load_tokenizer(folder, code.read_config(folder))
    sentences = list(find_warnings(rows, tokenize.say_what_is_lost, words))
    for sentence in sentences[:SHOWN]:
        print(f"Warning: {shorten(sentence)}", file=sys.stderr)
    if len(sentences) > SHOWN:
        print(f"Warning: {len(sentences) - SHOWN} more of this kind.", file=sys.stderr)


def shorten(text: str) -> str:
    """Return the first letters of a text that may quote a prompt of any length."""
    return text if len(text) <= MOST_LETTERS else f"{text[:MOST_LETTERS]} ..."


# What comes out.


def image_name(number: int) -> str:
    """Return the name of an image's file.

    >>> image_name(7)
    '0000007.png'
    """
    return f"{number:07d}.png"


def describe_images(rows: Rows, settings: Settings) -> list[dict[str, str]]:
    """Return what each image of a batch follows from: this is written into its file."""
    keys = np.asarray(jax.random.key_data(image_keys(settings.seed, rows["number"])))
    texts = []
    for row, (number, prompt, key) in enumerate(
        zip(rows["number"], rows["prompt"], keys, strict=True)
    ):
        own = {"prompt": prompt, "number": str(number), "key": " ".join(map(str, key))}
        if "edited" in rows:
            own["edited"] = rows["edited"][row]
        texts.append(own | settings.texts())
    return texts


def to_png(image: np.ndarray, texts: dict[str, str]) -> bytes:
    """Return a PNG file with texts, of an image, uint8 of shape (height, width, 3)."""
    info = PngInfo()
    for name, text in texts.items():
        info.add_itxt(name, text)
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="png", pnginfo=info)
    return buffer.getvalue()


def write_pngs(rows: Rows, folder: Path, settings: Settings) -> None:
    """Write a file for each image of a batch."""
    for number, image, texts in zip(
        rows["number"], rows["image"], describe_images(rows, settings), strict=True
    ):
        write_bytes(folder / image_name(number), to_png(image, texts))


def read_texts(folder: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """Yield each image of a folder: its file, and what is written in it."""
    for file in sorted(folder.glob("[0-9]*.png")):
        if not file.is_file():
            raise RuntimeError(f"{file} cannot be read (it is no file): remove it.")
        try:
            with Image.open(file, formats=["png"]) as image:
                yield file, dict(image.info)
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise RuntimeError(f"{file} cannot be read ({error}): remove it.") from None


def read_kept_settings(folder: Path) -> dict[str, str] | None:
    """Return the settings that a folder was made with; None if it has no ``settings.json``."""
    file = folder / SETTINGS_FILE
    if not file.is_file():
        return None
    try:
        kept = json.loads(read_text(file))
    except (OSError, ValueError, RecursionError) as error:
        raise RuntimeError(f"{file} cannot be read ({error}): remove it.") from None
    if not isinstance(kept, dict):
        raise RuntimeError(f"{file} holds no settings, but {reprlib.repr(kept)}: remove it.")
    return kept


def check_same(file: Path, texts: dict[str, str], wanted: dict[str, str | None]) -> None:
    """Raise ``RuntimeError`` if a file has other settings, another prompt, or another picture."""
    for name, text in wanted.items():
        if texts.get(name) != text:
            there = shorten(repr(texts.get(name)))
            raise RuntimeError(
                f"{file} is there already with the {name} {there}, not {shorten(repr(text))}: "
                "give a different OUT, or remove what is in this one."
            )


def find_missing(folder: Path, rows: list[dict], settings: Settings) -> list[dict]:
    """Return the rows whose images the folder lacks.

    Raises
    ------
    RuntimeError
        If the folder has images of other prompts or settings.
    """
    missing = {row["number"]: row for row in rows}
    expected = {}
    for row in rows:
        expected[str(row["number"])] = {name: row.get(name) for name in ("prompt", "edited")}
    images = list(read_texts(folder))
    kept = read_kept_settings(folder)
    own = settings.texts()
    if images and kept is not None:  # without images, a run that drew nothing has left them
        check_same(folder / SETTINGS_FILE, kept, own)
    for file, texts in images:
        number = texts.get("number", "")
        if number not in expected:
            raise RuntimeError(
                f"{file} has an image that is none of these prompts': give a different OUT, or "
                "remove what is in this one."
            )
        check_same(file, texts, expected[number] | own)
        missing.pop(int(number), None)
    return list(missing.values())


# Ray.


def import_ray() -> Any:
    """Import the package; ``RuntimeError`` if it is not installed."""
    try:
        import ray.data
    except ImportError:
        raise RuntimeError(f"Ray is not installed here: run `{INSTALL}`.") from None
    return ray


def start_ray(
    address: str | None = None, cpus: int | None = None, patience: float = PATIENCE
) -> None:
    """Connect to a cluster, or start Ray on this machine, if that has not been done yet.

    On this machine it starts without a network, without its dashboard, and with little memory.

    Parameters
    ----------
    address : str, optional
        Of the cluster; by default that in ``RAY_ADDRESS``, or else Ray starts here.
    cpus : int, optional
        How many CPUs Ray counts here; by default those that there are.
    patience : float
        After so many seconds in which no batch is finished, drawing ends with an error.

    Raises
    ------
    RuntimeError
        If Ray is not installed, or cannot be reached.
    """
    # Nothing is reported to Ray's makers, and what its processes log stays in their files.
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Ray forks to start its processes, which then run other programs: nothing there can deadlock.
    warnings.filterwarnings("ignore", message=r".*fork\(\)")
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    ray = import_ray()
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    options = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == "local":
        options |= {
            "num_cpus": cpus or os.cpu_count(),
            "object_store_memory": 100 * 2**20,
            "include_dashboard": False,
            "_node_ip_address": "127.0.0.1",
        }
    if not ray.is_initialized():
        # Ray gives one of its processes 15 seconds to import what it needs, which no option changes
        # (ray-project/ray 65983). The first time on a machine it also compiles that, so a second
        # try here is faster than the first; and what else keeps the cores busy may end.
        tries = 5 if address == "local" else 1
        for number in range(1, tries + 1):
            try:
                ray.init(address, **options)
                break
            except SystemExit:  # which Ray makes of SIGTERM
                raise KeyboardInterrupt(signal.SIGTERM) from None
            except Exception as error:  # of a start that takes too long, Ray says no more
                ray.shutdown()
                if number < tries:
                    continue
                reason, *_ = str(error).strip().splitlines() or [type(error).__name__]
                raise RuntimeError(
                    f"Ray does not start at {address} ({reason.rstrip('.')}): correct --address, "
                    "or start the same again when this machine has less to do."
                ) from None
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = sys.stdout.isatty()
    # An actor that dies is replaced, however often. If none draws any more, that has to end.
    context.execution_no_progress_timeout_s = patience


def plan_actors(actors: int | None = None, chips: int | None = None) -> dict[str, Any]:
    """Choose how many actors there are, and what each takes: a host's TPUs, a GPU, or a CPU.

    Parameters
    ----------
    actors : int, optional
        By default one for each host with TPUs, for each GPU, or for each host.
    chips : int, optional
        How many TPU chips each takes; by default all of a host.

    Returns
    -------
    dict
        The last arguments of `draw_rows`.
    """
    ray = import_ray()
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    tpus = [int(node["TPU"]) for node in nodes if node.get("TPU")]
    gpus = int(sum(node.get("GPU", 0) for node in nodes))
    if chips or tpus:
        chips = chips or min(tpus)
        fit = sum(host // chips for host in tpus)
        return {"actors": actors or fit or 1, "resources": {"TPU": chips}}
    if gpus:
        return {"actors": actors or gpus, "num_gpus": 1}
    return {"actors": actors or len(nodes), "num_cpus": 1}


def explain(error: Exception) -> str:
    """Return the sentence in what Ray raises, which has traces of several processes around it."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    sentences = re.findall(r"^(?:.*\))?(?:OS|Runtime|Value)Error: (.+)$", text, flags=re.MULTILINE)
    if sentences:
        return sentences[-1]
    if type(error).__name__ == "ExecutionTimeoutError":
        return (
            "No batch was finished for too long (see --patience). Either the actors found no place "
            "(ray status), or they die again and again, as when a batch needs more memory than "
            "there is: give a smaller --batch, and look into Ray's logs."
        )
    lines = text.strip().splitlines() or [""]
    return f"Ray stopped with {type(error).__name__}: {lines[-1].strip().rstrip('.')}."


# The command.


def draw_parser() -> argparse.ArgumentParser:
    parser = make_parser("course.draw", __doc__)
    parser.add_argument(
        "prompts", type=Path, metavar="PROMPTS", help="text, CSV, TSV, JSON lines or Parquet"
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder for the images")
    parser.add_argument(
        "--checkpoint",
        default=os.environ.get(CHECKPOINT_VARIABLE, "shapes-sd"),
        help="a bundled one, a folder, or a Hub id, with @revision if need be; default %(default)s",
    )
    parser.add_argument(
        "--edit", type=Path, metavar="FOLDER", help="of the pictures that the prompts change"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=positive, help="default: what suits the checkpoint")
    parser.add_argument("--guidance", type=finite, help="likewise; at 1 or below there is none")
    parser.add_argument(
        "--batch", type=positive, default=4, help="images that an actor draws at a time; default 4"
    )
    parser.add_argument("--address", help="of a Ray cluster; auto finds the one of this machine")
    parser.add_argument(
        "--actors",
        type=positive,
        help="default: one for each TPU host, for each GPU, or for each host",
    )
    parser.add_argument(
        "--patience",
        type=seconds,
        default=PATIENCE,
        metavar="SECONDS",
        help="give up if no batch is finished for so long; default %(default)s",
    )
    parser.add_argument("--chips", type=positive, help="TPU chips of each actor; default: a host's")
    return parser


def choose_settings(options: argparse.Namespace) -> tuple[Settings, Checkpoint]:
    """Return what to draw with, and what is known of the checkpoint."""
    checkpoint = options.checkpoint
    folder = find_local(checkpoint)
    if folder and checkpoint not in bundled_names():
        checkpoint = str(folder.absolute())  # the actors may be in another folder
    found = read_checkpoint(checkpoint)
    if options.edit and found.model != "flux2":
        raise RuntimeError(
            f"{checkpoint} is Stable Diffusion, which edits no pictures by prompts: leave out "
            "--edit, or give FLUX.2-klein by --checkpoint, such as shapes-flux2."
        )
    settings = Settings(
        checkpoint=checkpoint,
        seed=options.seed,
        steps=options.steps or found.num_inference_steps,
        guidance=found.guidance_scale if options.guidance is None else options.guidance,
        batch=options.batch,
    )
    return settings, found


def draw_missing(options: argparse.Namespace) -> None:
    """Draw what is missing, as the command line says."""
    folder = options.out.absolute()
    rows = read_prompts(options.prompts)
    if options.edit:
        rows = add_pictures(rows, options.prompts, options.edit)
    with writing_to(folder):
        settings, checkpoint = choose_settings(options)
        _draw_into(folder, rows, settings, checkpoint, options)


def _draw_into(
    folder: Path,
    rows: list[dict],
    settings: Settings,
    checkpoint: Checkpoint,
    options: argparse.Namespace,
) -> None:
    """Draw what a folder lacks of these prompts' images."""
    missing = find_missing(folder, rows, settings)
    print(f"{len(rows)} prompts, of which {len(rows) - len(missing)} are drawn already", flush=True)
    if not missing:
        return
    warn_about_prompts(missing, checkpoint)
    write = partial(write_pngs, folder=folder, settings=settings)
    ray = import_ray()
    was_running = ray.is_initialized()
    cpus = max(options.actors or 1, os.cpu_count() or 1)
    start_ray(options.address, cpus, options.patience)
    try:
        with ending_as_ctrl_c():  # Ray has set what happens instead
            plan = plan_actors(options.actors, options.chips)
            batches = -(-len(missing) // settings.batch)
            plan["actors"] = min(plan["actors"], batches)
            # These, or there are no images yet.
            content = json.dumps(settings.texts(), indent=1) + "\n"
            write_bytes(folder / SETTINGS_FILE, content.encode())
            for _ in draw_rows(missing, settings, write, **plan).iter_batches(batch_size=None):
                pass
    except Exception as error:
        left = len(find_missing(folder, rows, settings))
        raise RuntimeError(
            f"{explain(error)}\n{len(missing) - left} images were drawn, and {left} are missing: "
            "start the same again for these."
        ) from None
    finally:
        if not was_running:
            ray.shutdown()
    left = len(find_missing(folder, rows, settings))
    if left:
        raise RuntimeError(
            f"{left} images are not in {folder}: they may lie on the disks of other machines, so "
            "give an OUT that all machines see."
        )
    print(f"{len(missing)} images drawn", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw what the command line, or these arguments in its place, says; the exit status."""
    jax.config.update("jax_platforms", "cpu")  # here; accelerators are for the actors
    interrupted = "Interrupted: started again, the same command draws what is missing."
    return run(draw_parser(), draw_missing, arguments, interrupted)


if __name__ == "__main__":
    # From here, so that actors find what they run under its own name.
    from course import draw

    sys.exit(draw.main())
