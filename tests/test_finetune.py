"""Training a LoRA gives the same on all devices and after an interruption, and refuses bad input.

Training is tried on models that are as small as can be, with random parameters: Stable Diffusion
with a new word, and FLUX.2 with pairs of pictures, from which it learns to edit.
"""

import csv
import dataclasses
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from PIL import EpsImagePlugin, Image, ImageCms
from safetensors.numpy import load_file, save_file

from course import flux2, sd
from course.finetune import photos, training
from course.finetune.__main__ import main
from course.model import files
from course.model.lora import merge
from course.sd import lora, words
from course.shapes import judge, scenes
from helpers import bundled_checkpoint, read_record
from lab.score import finetune as scores
from tests.makers.files import edit_json

SOURCE = Path(bundled_checkpoint("shapes-sd").source)
SHIPPED = SOURCE.parent / "taught" / "bowtie.safetensors"
FIXTURES = Path(__file__).parent / "fixtures"
RECIPE = training.Recipe(rank=2, steps=4, batch=8, rehearsed=2, seed=3)
WORD = ["--word", "bowtie", "--like", "star"]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The folder of a model with one block on each way, and random parameters."""
    folder = tmp_path_factory.mktemp("small")
    for file in SOURCE.rglob("*"):
        if file.suffix in (".json", ".txt"):
            (folder / file.relative_to(SOURCE)).parent.mkdir(exist_ok=True)
            shutil.copyfile(file, folder / file.relative_to(SOURCE))
    smaller = {
        "unet": {
            "block_out_channels": [32],
            "attention_head_dim": 2,
            "down_block_types": ["CrossAttnDownBlock2D"],
            "up_block_types": ["CrossAttnUpBlock2D"],
            "layers_per_block": 1,
            # With one channel in each group, the norm would take away what the timestep adds, and
            # leave rounding as a gradient.
            "norm_num_groups": 8,
        },
        "vae": {"layers_per_block": 1},
        "text_encoder": {"num_hidden_layers": 1},
    }
    for part, changes in smaller.items():
        file = folder / part / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    rng = np.random.default_rng(0)
    shapes = sd.parameter_shapes(sd.read_config(folder))
    params = jax.tree.map(lambda x: 0.1 * rng.standard_normal(x.shape, np.float32), shapes)
    sd.save(params, folder, folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder of bow ties, and one of what the model knows."""
    folder = tmp_path_factory.mktemp("images")
    scenes.write_folder(scenes.new_examples("bowtie", 5), folder / "new")
    scenes.write_folder(scenes.training_scenes(3, 0), folder / "old")
    return folder


@pytest.fixture(scope="module", params=["sd", "flux2"])
def lesson(request, small, folders):
    """A small model, its configuration, and the examples."""
    new, old = (photos.read_folder(folders / name, 64, 64) for name in ("new", "old"))
    if request.param == "sd":
        params, config, tokenize = words.add_word(*sd.load(small), "bowtie", "star")
        return params, config, training.make_data(params, config, tokenize, new, old, word=True)
    params, config, tokenize = request.getfixturevalue("small_flux2")
    pairs = {"references": np.concatenate([new[0], old[0]])[::-1]}
    return params, config, training.make_data(params, config, tokenize, new, old, **pairs)


def has_word(params):
    return "unet" in params


@pytest.fixture(scope="module")
def study(lesson):
    """A function that trains by a recipe on so many devices; a step for both is compiled once."""
    params, config, data = lesson
    steps = {}

    def study(devices=1, recipe=RECIPE, saver=None, fail_at=None, **options):
        mesh = Mesh(np.array(jax.devices()[:devices]), ("data",), axis_types=(AxisType.Auto,))
        if (devices, recipe) not in steps:
            steps[devices, recipe] = training.compile_step(config, recipe, mesh)
        state, *placed = jax.device_put(
            (training.init_state(params, recipe, has_word(params)), params, data),
            NamedSharding(mesh, P()),
        )
        if saver:
            state = saver.restore(state)

        def step(state, *inputs):
            if int(state.step) == fail_at:
                raise SystemExit("killed")
            return steps[devices, recipe](state, *inputs)

        return training.train(step, state, *placed, saver=saver, **options)

    return study


def same(found, expected):
    return jax.tree.all(jax.tree.map(np.array_equal, found, expected))


def test_losses_depend_neither_on_devices_nor_on_what_is_computed_twice(study):
    alone = study(1).losses
    otherwise = study(3, dataclasses.replace(RECIPE, remat=True)).losses
    assert (np.asarray(alone) > 0).all()
    np.testing.assert_allclose(otherwise, alone, rtol=2e-5)


def test_each_step_draws_examples_and_noise_of_its_own(study):
    """The learning rate of the first step is 0, so the second step has the same model."""
    first, second, *_ = np.asarray(study(1).losses)
    assert first != second


def test_with_rematerialisation_less_is_kept_for_the_gradients(lesson):
    params, config, data = lesson
    trained = training.init_state(params, RECIPE, has_word(params)).trained
    batch = training.draw_batch(jax.random.key(0), config, RECIPE, data)

    def kept(recipe):
        """How many numbers the way back needs of the way forward."""

        def backward(trained):
            loss = partial(training.loss_fn, config=config, recipe=recipe)
            return jax.vjp(lambda trained: loss(trained, params, batch), trained)[1]

        return sum(x.size for x in jax.tree.leaves(jax.eval_shape(backward, trained)))

    assert kept(dataclasses.replace(RECIPE, remat=True)) < kept(RECIPE) / 2


def test_a_batch_is_filled_up_with_examples_that_do_not_count(lesson):
    _, config, data = lesson
    batch = training.draw_batch(jax.random.key(0), config, RECIPE, data)
    filled = training.fill_up(batch, 3)
    assert filled.weights.tolist() == [1] * 8 + [0]
    assert all(len(x) == 9 for x in jax.tree.leaves(filled))
    assert same(jax.tree.map(lambda x: x[:8], filled), batch)
    assert same(training.fill_up(batch, 4), batch)


def test_only_the_last_examples_of_a_batch_are_rehearsed(lesson):
    _, config, data = lesson
    numbered = data._replace(latents=jnp.arange(8.0).reshape(-1, 1, 1, 1))
    for seed in range(20):
        batch = training.draw_batch(jax.random.key(seed), config, RECIPE, numbered)
        chosen = batch.latents.flatten()
        assert (chosen[:6] < data.new).all() and (chosen[6:] >= data.new).all()
    nothing_old = numbered._replace(new=jnp.int32(8))
    batch = training.draw_batch(jax.random.key(0), config, RECIPE, nothing_old)
    assert (batch.latents.flatten() < 8).all()


def test_training_changes_what_it_should_and_nothing_else(study, lesson):
    params, _, _ = lesson
    before, after = training.init_state(params, RECIPE, has_word(params)), study(1)
    assert int(after.step) == RECIPE.steps
    moved = jax.tree.map(lambda a, b: not np.array_equal(a, b), after.trained, before.trained)
    assert jax.tree.all(moved)
    full = training.insert_trained(params, before.trained)
    assert full["vae"] is params["vae"]
    (pairs,) = before.trained["lora"].values()
    products = [pair.product for pair in pairs.values()]
    assert all((product == 0).all() for product in products), "at first the model is what it was"


@pytest.mark.parametrize("fail_at", range(RECIPE.steps))
def test_a_run_killed_at_any_step_and_resumed_ends_in_the_same_bits(
    study, lesson, tmp_path, fail_at
):
    about = training.describe(lesson[0], RECIPE, lesson[2])
    with pytest.raises(SystemExit):
        study(saver=training.Saver(tmp_path, about), fail_at=fail_at, every=2)
    resumed = study(saver=training.Saver(tmp_path, about), every=2)
    assert same(resumed, study())


def test_a_full_disk_is_a_sentence_and_the_last_state_stays(study, lesson, tmp_path, capfd):
    """No file may have more bytes than a state takes, less one, which the system refuses alike."""
    resource = pytest.importorskip("resource", reason="Windows has no such limits.")
    saver = training.Saver(tmp_path, training.describe(lesson[0], RECIPE, lesson[2]))
    room = training.room_for(study(saver=saver, until=2))
    assert sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()) <= room
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room - 1, hard))
    try:
        with pytest.raises(RuntimeError, match=r"step 4 cannot be saved \(File too large\)"):
            study(saver=saver, until=4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not capfd.readouterr().err, "Orbax's threads print tracebacks."
    assert [int(folder.name) for folder in tmp_path.glob("[0-9]*")] == [2]


@pytest.mark.parametrize("part", ["about", "state"])
def test_a_damaged_state_is_a_sentence_and_the_one_before_is_used(study, lesson, tmp_path, part):
    about = training.describe(lesson[0], RECIPE, lesson[2])
    study(saver=training.Saver(tmp_path, about), every=1, until=3)
    files = [file for file in (tmp_path / "3" / part).rglob("*") if file.is_file()]
    largest = max(files, key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:20])
    with pytest.raises(RuntimeError, match=r"3 cannot be read \(.*\): remove this folder"):
        study(saver=training.Saver(tmp_path, about))
    shutil.rmtree(tmp_path / "3")
    assert same(study(saver=training.Saver(tmp_path, about)), study())


def command(small, folders, file, *more):
    found = [sys.executable, "-m", "course.finetune", folders / "new", file, "--model", small]
    found += ["--rehearse", folders / "old", "--rank", 2, "--batch", 8, "--rehearsed", 2]
    return [str(argument) for argument in [*found, *WORD, *more]]


def test_the_command_is_killed_and_goes_on(small, folders, tmp_path):
    """By the system, while it trains: what it had saved is enough."""
    file = tmp_path / "lora.safetensors"
    started = command(small, folders, file, "--steps", "40", "--save-every", "10")
    process = subprocess.Popen(started, stdout=subprocess.PIPE, text=True)
    said = ""
    while "step 20 of" not in said:
        said += (letter := process.stdout.read(1))
        assert letter, said
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL and not file.exists()
    done = subprocess.run(started, capture_output=True, text=True, check=True)
    assert re.search(r"from step (10|20|30) on", done.stdout)
    params, config, tokenize = words.read_word(file, *sd.load(small))
    pairs = lora.read_lora(file, params, config)
    assert pairs["unet"].keys() == training.start_lora(params, training.Recipe())["unet"].keys()
    assert all(np.asarray(pair.up).any() for pair in pairs["unet"].values()), (
        "convolutions have learned, too"
    )
    tokens, channels = params["text_encoder"][training.EMBEDDINGS].shape
    assert load_file(words.word_file(file))["bowtie"].shape == (channels,)
    assert tokenize(["a bowtie"])[0, 0, 2] == tokens - 1


def test_flux2_is_taught_to_edit_by_the_command(flux2_folder, folders, tmp_path, capsys):
    file, before = tmp_path / "lora.safetensors", tmp_path / "before"
    shutil.copytree(folders / "new", before)
    arguments = [folders / "new", file, "--model", flux2_folder, "--references", before]
    arguments += ["--mirror", "--size", 16, "--steps", 4, "--batch", 2, "--rank", 2]
    assert main([str(argument) for argument in arguments]) == 0
    assert "Training on 10 images" in capsys.readouterr().out
    params, config, _ = flux2.load(flux2_folder, "float32")
    pairs = flux2.read_lora(file, params, config)
    expected = training.start_lora(params, training.Recipe())
    assert pairs["transformer"].keys() == expected["transformer"].keys()
    assert all(np.asarray(pair.up).any() for pair in pairs["transformer"].values())
    (before / "003.png").unlink()
    assert main([str(argument) for argument in arguments]) == 1
    assert "003.png is an edit of nothing" in capsys.readouterr().err
    shutil.copyfile(before / "002.png", before / "002.jpg")
    assert main([str(argument) for argument in arguments]) == 1
    assert "002.png may be an edit of 002.jpg or of 002.png in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (WORD, "is FLUX.2, whose text encoder is not trained: leave out --word"),
        (["--attention", "dot_product"], "--attention dot_product is for Stable Diffusion, and"),
        (["--size", "60"], "--size is 60: give a multiple of 8."),
        (["--rehearse", "."], "Give --rehearse, --references and --rehearse-references together"),
        (["--model", SOURCE], "is Stable Diffusion, which is not trained on pairs: leave out"),
    ],
)
def test_what_a_model_has_not_is_refused(
    flux2_folder, folders, tmp_path, capsys, options, sentence
):
    given = [folders / "new", tmp_path / "lora.safetensors", "--model", flux2_folder]
    given += ["--references", folders / "new", *options]
    assert main([str(argument) for argument in given]) == 1
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == 1


def test_a_flow_map_is_refused(flux2_folder, folders, tmp_path, capsys):
    model = shutil.copytree(flux2_folder, tmp_path / "model")
    edit_json(model / "transformer" / "config.json", lambda old: old | {"guidance_embeds": True})
    given = [folders / "new", tmp_path / "lora.safetensors", "--model", model]
    assert main([str(argument) for argument in given]) == 1
    said = capsys.readouterr().err
    assert "is a flow map, whose steps know where they go to" in said and said.count("\n") == 1


def test_pairs_are_those_of_one_name_in_the_order_of_the_captions(tmp_path):
    """With captions in a table that has another order, and lacks a picture."""
    new, before = tmp_path / "new", tmp_path / "before"
    for folder, ending in ((new, ".png"), (before, ".bmp")):
        folder.mkdir()
        for number in range(4):
            Image.new("RGB", (8, 8), (50 * number,) * 3).save(folder / f"{number}{ending}")
    rows = [{"file_name": f"{number}.png", "text": "a"} for number in (2, 0, 3)]
    (new / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    images, captions = photos.read_folder(new, 8, 8, "b")
    assert captions == ["a", "a", "a", "b"]
    references = photos.read_references(before, new, 8, 8, "b")
    assert np.array_equal(images, references)
    with (new / "metadata.jsonl").open("a") as file:
        file.write("\n" + json.dumps(rows[0]))
    with pytest.raises(ValueError, match=r"Line 4 of .* is the second one of 2\.png: leave one"):
        photos.read_folder(new, 8, 8, "b")


def test_pictures_may_be_called_as_other_programs_call_captions(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "caption.png")
    (tmp_path / "caption.txt").write_text("a black square")
    assert photos.read_folder(tmp_path, 8, 8)[1] == ["a black square"]


def write_photos(folder):
    """A folder of pictures as people have them; all are red on the left and blue on the right."""
    folder.mkdir()
    pixels = np.zeros((64, 64, 3), np.uint8)
    pixels[:, :32, 0] = 255
    pixels[:, 32:, 2] = 255
    image = Image.fromarray(pixels)
    image.save(folder / "plain.png")
    # A camera that was held upright stores what it saw lying, and says so.
    exif = Image.Exif()
    exif[0x0112] = 6  # turn it a quarter to the right
    lying = image.transpose(Image.Transpose.ROTATE_90)
    lying.save(folder / "phone.jpg", exif=exif, quality=95)
    image.resize((200, 100)).crop((50, 0, 150, 100)).save(folder / "large.webp", lossless=True)
    wide = Image.new("RGB", (96, 64), "white")  # whose edges are cut off
    wide.paste(image, (16, 0))
    wide.save(folder / "wide.bmp")
    return folder


def test_photos_are_read_as_people_have_them(tmp_path, capsys):
    """Turned, of other sizes and shapes; transparent, grey and with 16 bits."""
    folder = write_photos(tmp_path / "photos")
    images, captions = photos.read_folder(folder, 64, 64, "a photo")
    assert captions == ["a photo"] * 4
    assert images.shape == (4, 64, 64, 3) and images.dtype == np.float32
    for image in images:
        assert np.abs(image[:, :24] - [1, 0, 0]).max() < 0.03
        assert np.abs(image[:, 40:] - [0, 0, 1]).max() < 0.03
    assert "1 of 4 images in" in capsys.readouterr().out

    shutil.rmtree(folder)
    folder.mkdir()
    Image.new("LA", (64, 64), (0, 0)).save(folder / "transparent.png")
    Image.new("L", (64, 64), 128).save(folder / "grey.png")
    Image.fromarray(np.full((64, 64), 128 * 257, np.uint16)).save(folder / "sixteen.png")
    small = Image.new("P", (32, 32), 0)
    small.putpalette([10, 20, 30] * 256)
    small.save(folder / "small.png")
    images, _ = photos.read_folder(folder, 64, 64, "a photo")
    colors = [image[0, 0] * 255 for image in images]
    np.testing.assert_allclose(colors, [[128] * 3, [128] * 3, [10, 20, 30], [255] * 3], atol=0.6)
    assert "1 of 4 images in" in capsys.readouterr().out


def test_formats_of_scanners_browsers_and_old_programs_are_read_and_hidden_files_left(tmp_path):
    red = Image.new("RGB", (64, 64), (255, 0, 0))
    for name in ("a.tif", "b.tiff", "c.avif", "d.jfif", "e.gif", "f.JPG"):
        red.save(tmp_path / name, format="JPEG" if name.endswith("jfif") else None)
    (tmp_path / "._a.jpg").write_bytes(b"\0\5\x16\7")  # what macOS puts beside a.jpg
    images, _ = photos.read_folder(tmp_path, 64, 64, "red")
    assert images.shape == (6, 64, 64, 3)
    assert np.abs(images - [1, 0, 0]).max() < 0.03


def swap_red_and_green(profile):
    """An ICC profile in whose colours red is green: the places of two entries are exchanged."""
    return profile.replace(b"rXYZ", b"xxxx").replace(b"gXYZ", b"rXYZ").replace(b"xxxx", b"gXYZ")


def test_the_colours_of_a_photo_are_those_that_its_profile_means(tmp_path):
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    other = swap_red_and_green(srgb)
    red = Image.new("RGB", (64, 64), (255, 0, 0))
    red.save(tmp_path / "a.png", icc_profile=srgb)
    red.save(tmp_path / "b.png", icc_profile=other)
    transparent = Image.new("RGBA", (64, 64), (255, 0, 0, 255))
    transparent.save(tmp_path / "c.png", icc_profile=other)
    red.save(tmp_path / "d.png", icc_profile=b"no profile")
    Image.new("CMYK", (64, 64), (0, 255, 255, 0)).save(tmp_path / "e.jpg", icc_profile=other)
    Image.new("L", (64, 64), 255).save(tmp_path / "f.png", icc_profile=other)
    images, _ = photos.read_folder(tmp_path, 64, 64, "a photo")
    red, green, white = [1, 0, 0], [0, 1, 0], [1, 1, 1]
    found = images[:, 32, 32]
    np.testing.assert_allclose(found, [red, green, green, red, red, white], atol=0.02)


def test_a_drawing_in_postscript_starts_no_program(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *arguments: started.append(arguments))
    (tmp_path / "1.png").write_text(
        "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 64\n%%EndComments\nshowpage\n%%EOF\n"
    )
    with pytest.raises(ValueError, match=r"1\.png is damaged, or no image in PNG, JPEG"):
        photos.read_folder(tmp_path, 64, 64, "a drawing")
    assert started == []


def test_captions_stand_beside_pictures_or_are_one_for_all(tmp_path):
    folder = write_photos(tmp_path / "photos")
    (folder / "phone.txt").write_text("\ufeffein Foto,\nschön\n", encoding="utf-8")
    _, captions = photos.read_folder(folder, 64, 64, "a photo")
    # Files in the order of their names: large, phone, plain, wide.
    assert captions == ["a photo", "ein Foto, schön", "a photo", "a photo"]
    (folder / "wide.caption").write_text("a wide photo", encoding="utf-8")
    assert photos.read_folder(folder, 64, 64, "a photo")[1][3] == "a wide photo"


def test_captions_are_in_a_table_of_json_lines_or_csv(tmp_path):
    folder = write_photos(tmp_path / "photos")
    expected = ["one, two", "second\u2028line", "third", "fourth"]
    names = sorted(file.name for file in folder.iterdir())
    rows = [{"file_name": name, "text": text} for name, text in zip(names, expected, strict=True)]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    (folder / "metadata.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert photos.read_folder(folder, 64, 64)[1] == expected
    (folder / "metadata.jsonl").unlink()
    with (folder / "metadata.csv").open("w", encoding="utf-8", newline="") as opened:
        table = csv.DictWriter(opened, ["file_name", "text"])
        table.writeheader()
        table.writerows(rows)
    assert photos.read_folder(folder, 64, 64)[1] == expected


def without_images(folder):
    for file in folder.glob("*.png"):
        file.unlink()


def replace_line(text):
    def change(folder):
        lines = (folder / "metadata.jsonl").read_text(encoding="utf-8").splitlines()
        (folder / "metadata.jsonl").write_text("\n".join([text, *lines[1:]]), encoding="utf-8")

    return change


def write_texts(text):
    """Captions as files beside the pictures, in Latin-1."""

    def change(folder):
        (folder / "metadata.jsonl").unlink()
        for file in folder.glob("*.png"):
            file.with_suffix(".txt").write_text(text, encoding="latin-1")

    return change


BAD_FOLDERS = {
    "empty": (without_images, "has no images: put some there"),
    "images in folders below": (
        lambda folder: (
            (folder.rename(folder.with_name("100_star")) and folder.mkdir())
            or folder.with_name("100_star").rename(folder / "100_star")
        ),
        "has no images, and .*100_star has some: give that",
    ),
    "a table that is not read": (
        lambda folder: (folder / "metadata.jsonl").rename(folder / "metadata.json"),
        r"has captions in metadata\.json: write them into metadata\.jsonl, as .*file_name",
    ),
    "two tables": (
        lambda folder: (folder / "metadata.csv").write_text("file_name,text\n"),
        r"has captions in metadata\.csv and metadata\.jsonl: write them into",
    ),
    "two columns of one name": (
        lambda folder: [
            (folder / "metadata.jsonl").unlink(),
            (folder / "metadata.csv").write_text("file_name,text,text\n000.png,a star,a heart\n"),
        ],
        r"Two columns of .*metadata\.csv are called text: take one out",
    ),
    "two captions": (
        lambda folder: [
            write_texts("a star")(folder),
            (folder / "000.caption").write_text("a heart"),
        ],
        r"000\.txt and .*000\.caption are for one image: take one out",
    ),
    "no captions": (
        lambda folder: (folder / "metadata.jsonl").unlink(),
        "000.png has no caption: write one into a .txt file",
    ),
    "an empty caption": (write_texts(" "), "The caption of .*000.png is empty"),
    "not UTF-8": (write_texts("schön"), "000.txt is not in UTF-8"),
    "a photo that is not read": (
        lambda folder: (folder / "IMG_1.HEIC").touch(),
        "IMG_1.HEIC is a HEIC photo: export it as JPEG",
    ),
    "an image without a caption": (
        lambda folder: shutil.copyfile(folder / "000.png", folder / "more.png"),
        "more.png has no caption: metadata.jsonl must have a line for each image",
    ),
    "a caption without an image": (
        lambda folder: (folder / "003.png").unlink(),
        "003.png is not there: metadata",
    ),
    "no JSON": (
        replace_line("000.png a bowtie"),
        "Line 1 of .* is '000.png a bowtie': write it as",
    ),
    "other names": (
        replace_line('{"image": "000.png", "caption": "x"}'),
        "Line 1 of .*: write it as",
    ),
    "a caption that is no text": (
        replace_line('{"file_name": "000.png", "text": 7}'),
        "Line 1 of .*: write it as",
    ),
    "a link to nothing": (
        lambda folder: [(folder / "001.png").unlink(), (folder / "001.png").symlink_to("none")],
        "001.png is no file, or a link to nothing: take it out",
    ),
    "captions without end": (
        lambda folder: os.truncate(folder / "metadata.jsonl", 10**9),
        r"metadata.jsonl has 1000 MB, too many for captions",
    ),
    "a folder in place of captions": (
        lambda folder: [
            (folder / "metadata.jsonl").unlink(),
            (folder / "metadata.jsonl").mkdir(),
        ],
        r"metadata\.jsonl is no file: take it out",
    ),
    "a pipe in place of captions": (
        lambda folder: [
            (folder / "metadata.jsonl").unlink(),
            os.mkfifo(folder / "metadata.jsonl"),
        ],
        r"metadata\.jsonl is no file: take it out",
    ),
    "a caption without end": (
        lambda folder: [
            write_texts("a star")(folder),
            os.truncate(folder / "000.txt", 2**36),
        ],
        r"000\.txt has 68719 MB, too many for captions",
    ),
    "a picture without end": (
        lambda folder: [
            Image.new("RGB", (64, 64)).save(folder / "001.png", format="webp"),
            os.truncate(folder / "001.png", 2**36),
        ],
        "001.png has 68719 MB, which no picture has: take it out",
    ),
    "no image": (
        lambda folder: (folder / "001.png").write_text("<html>"),
        "001.png is damaged, or no image",
    ),
    "a HEIC photo by another name": (
        lambda folder: (folder / "001.png").write_bytes(b"\0\0\0\x18ftypheic"),
        "001.png is a HEIC photo: export it as JPEG",
    ),
    "too many pixels": (
        lambda folder: Image.new("1", (14000, 13000)).save(folder / "001.png"),
        "001.png is too large: Image size .* Make it smaller",
    ),
    "floating-point numbers": (
        lambda folder: Image.new("F", (64, 64)).save(folder / "001.png", format="tiff"),
        "001.png has numbers of 32 bits",
    ),
}


@pytest.mark.parametrize("how", BAD_FOLDERS)
def test_a_bad_folder_of_images_is_refused_in_a_sentence(folders, tmp_path, how):
    spoil, message = BAD_FOLDERS[how]
    spoil(Path(shutil.copytree(folders / "new", tmp_path / "new")))
    with pytest.raises((FileNotFoundError, ValueError), match=message) as refused:
        photos.read_folder(tmp_path / "new", 64, 64)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["new/000.png", "nothing"])
def test_what_is_no_folder_of_images_is_refused(folders, name):
    with pytest.raises(FileNotFoundError, match="is no folder: give one with pictures"):
        photos.read_folder(folders / name, 64, 64)


BAD_COMMANDS = {
    "a rank of 0": (["--rank", "0"], "rank is 0: choose 1 to 10000"),
    "nothing new": (
        ["--rehearsed", "8"],
        "8 of 8 examples in a step are rehearsed: leave some for the new",
    ),
    "unknown layers": (["--layers", "text"], "There are no layers 'text': choose attention or all"),
    "one step": (["--steps", "1"], "steps is 1: choose 2 to 1e+07"),
    "a batch that no machine holds": (["--batch", "1000000000"], "choose 1 to 10000"),
    "images that no machine holds": (
        ["--size", "1099511627776"],
        "--size is 1099511627776: give at most 16384.",
    ),
    "saving at no step": (["--save-every", "0"], "save_every is 0: choose 1 or more"),
    "a rate that is no number": (["--rate", "nan"], "rate is nan: choose 0 to 1"),
    "a share of 5": (["--dropped", "5"], "dropped is 5.0: choose 0 to 1"),
    "a negative weight": (["--prior-weight", "-1"], "prior_weight is -1.0: choose 0 or more"),
    "a negative seed": (
        ["--seed", "-1"],
        "The seed is -1: give a whole number",
    ),
    "a weight too large": (["--prior-weight", "1e39"], "choose 0 to 3.40282e+38"),
    "unknown attention": (["--attention", "fast"], "There is no attention 'fast'"),
    "a word in no caption": (["--word", "bowknot"], "The word 'bowknot' stands in no caption"),
    "a known word": (["--word", "heart"], "'heart' is no new word"),
    "two words": (["--word", "bow tie"], "'bow tie' is no new word"),
    "a word that takes minutes": (["--word", "bow" * 9000], "is no new word: choose one"),
    "a word like a space": (["--like", " "], "' ' is no word that the model knows: say what"),
    "a sign for a byte": (["--word", "İ"], "'İ' is no new word: choose one"),
    "a word like nothing": (["--like", ""], "Give --word and --like together"),
    "no model": (["--model", "nowhere"], "nowhere is no folder, no Hub id"),
}


def test_the_file_has_to_be_called_as_other_programs_want_it(small, folders, tmp_path, capsys):
    assert main(command(small, folders, tmp_path / "lora.pt")[3:]) == 1
    assert "lora.pt is no name for a LoRA" in capsys.readouterr().err


@pytest.mark.parametrize("how", BAD_COMMANDS)
def test_a_bad_command_ends_in_a_sentence(small, folders, tmp_path, capsys, how):
    options, message = BAD_COMMANDS[how]
    assert main(command(small, folders, tmp_path / "lora.safetensors", *options)[3:]) == 1
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_a_state_of_something_else_is_not_resumed(study, lesson, small, tmp_path):
    about = training.describe(lesson[0], RECIPE, lesson[2])
    study(saver=training.Saver(tmp_path, about), until=2)
    with pytest.raises(
        ValueError, match="with rank = 2, and now it is 4: give what it was, a different FILE"
    ):
        training.Saver(
            tmp_path, training.describe(lesson[0], dataclasses.replace(RECIPE, rank=4), lesson[2])
        )
    other, *_ = sd.load(SOURCE)
    pairs = jax.tree.map(lambda matrix: matrix + 1e-3, training.start_lora(lesson[0], RECIPE))
    ((part, of_part),) = pairs.items()
    name, pair = next(iter(of_part.items()))
    merged = merge(lesson[0], {part: {name: pair}})
    for different in (other, merged):
        with pytest.raises(ValueError, match="of other parameters of the model"):
            training.Saver(tmp_path, training.describe(different, RECIPE, lesson[2]))


def test_a_word_is_one_token_wherever_it_stands():
    params, config, tokenize = sd.load(SOURCE)
    _, its_config, with_word = words.add_word(params, config, tokenize, "bowtie", "star")
    number = its_config.text[0].vocab_size - 1
    assert number == config.text[0].vocab_size
    prompts = [
        "a red bowtie on a white background",
        "Bowtie",
        "bowties",
        "bowtie, bowtie",
        "a red heart",
    ]
    assert [(row == number).sum() for row in with_word(prompts)] == [1, 1, 0, 2, 0]
    assert np.array_equal(with_word(prompts[4:]), tokenize(prompts[4:]))
    star = tokenize(["a red star on a white background"])
    assert np.array_equal(
        np.where(with_word(prompts[:1]) == number, star, with_word(prompts[:1])), star
    )
    with pytest.warns(UserWarning, match="A prompt has 80 tokens, and 75 are read: not 'bowtie"):
        assert with_word(["bowtie " * 80])[0, 0, -1] == star[0, 0, -1]
    with pytest.raises(ValueError, match="gets no new word here"):
        words.add_word(*sd.load(SOURCE.parent / "shapes-sdxl"), "bowtie", "star")


@pytest.mark.parametrize(("nan_from", "kept"), [(1, []), (13, [5, 10])])
def test_training_stops_at_a_loss_that_is_not_finite(nan_from, kept):
    """The states that were saved before stay, and no other is saved."""

    saved = []
    saver = SimpleNamespace(save=lambda state: saved.append(int(state.step)))

    def step(state, params, data):
        loss = np.nan if state.step + 1 >= nan_from else 1.0
        return state._replace(
            step=state.step + 1, losses=state.losses.at[state.step].set(jnp.float32(loss))
        )

    state = training.State(jnp.int32(0), {}, (), jnp.zeros(20))
    with pytest.raises(RuntimeError, match=f"The loss is nan after step {nan_from}, so training"):
        training.train(step, state, {}, None, saver=saver, every=5)
    assert saved == kept


def test_the_word_of_a_different_model_is_refused(tmp_path):
    save_file({"bowtie": np.zeros(768, np.float32)}, tmp_path / "lora.word.safetensors")
    with pytest.raises(
        ValueError, match=r"has a vector of \(768,\), and this model's have 64 numbers"
    ):
        words.read_word(tmp_path / "lora.safetensors", *sd.load(SOURCE))
    save_file(
        {word: np.zeros(64, np.float32) for word in ("bowtie", "house")},
        tmp_path / "lora.word.safetensors",
    )
    with pytest.raises(ValueError, match="has 2 arrays with embeddings of words"):
        words.read_word(tmp_path / "lora.safetensors", *sd.load(SOURCE))


def test_untrained_text_encoders_run_once_and_xl_has_zeros_for_no_caption():
    params, config, tokenize = sd.load(SOURCE.parent / "shapes-sdxl")
    captions = ["a red heart", "a star", "a red heart", ""]
    images = np.zeros((4, 64, 64, 3), np.float32)
    data = training.make_data(params, config, tokenize, (images, captions), word=False)
    assert data.caption.tolist() == [1, 2, 1, 0]
    expected = sd.encode_prompts(params, config, tokenize(["a red heart", "a star"]))
    for found, wanted in zip(data.texts, expected, strict=True):
        assert not found[0].any()
        np.testing.assert_allclose(found[1:], wanted, atol=1e-5)

    unet = training.trained_parts(params, word=False)
    assert unet.keys() == {"unet"}
    trained = training.init_state(unet, RECIPE, word=False).trained
    batch = training.draw_batch(jax.random.key(0), config, RECIPE, data)
    assert training.loss_fn(trained, unet, batch, config, RECIPE) > 0


def test_what_is_rehearsed_counts_by_its_weight(lesson):
    _, config, data = lesson
    half = data._replace(prior_weight=jnp.float32(0.5))
    batch = training.draw_batch(jax.random.key(0), config, RECIPE, half)
    assert batch.weights.tolist() == [1] * 6 + [0.5] * 2


def test_the_loss_at_a_timestep_depends_on_the_model_alone(lesson):
    params, config, data = lesson
    trained = training.init_state(params, RECIPE, has_word(params)).trained
    loss_at = jax.jit(training.loss_at, static_argnames="config")
    losses = [float(loss_at(t, trained, params, data, config)) for t in (100, 100, 900)]
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize("name", ["shapes-sd", "shapes-sdxl"])
def test_other_programs_find_the_keys_of_a_trained_lora(name, tmp_path):
    """In the UNet of XL, kohya's scripts have the names of the original layout."""
    params, config, _ = sd.load(SOURCE.parent / name)
    pairs = training.start_lora(params, training.Recipe())
    lora.save_lora(tmp_path / "lora.safetensors", pairs, config)
    tensors = load_file(tmp_path / "lora.safetensors")
    layers = {key.split(".", 1)[0] for key in tensors}
    if config.is_xl:
        assert "lora_unet_input_blocks_1_0_in_layers_2" in layers
    else:
        assert "lora_unet_down_blocks_0_resnets_0_conv1" in layers
    endings = ("lora_down.weight", "lora_up.weight", "alpha")
    assert tensors.keys() == {f"{layer}.{ending}" for layer in layers for ending in endings}
    for layer in layers:
        assert tensors[f"{layer}.alpha"] == len(tensors[f"{layer}.lora_down.weight"])


def test_a_file_that_cannot_be_written_leaves_the_earlier_one(tmp_path, monkeypatch):
    params, config, _ = sd.load(SOURCE)
    pairs = training.start_lora(params, RECIPE)
    lora.save_lora(tmp_path / "lora.safetensors", pairs, config)
    before = (tmp_path / "lora.safetensors").read_bytes()

    def fill_disk(stream):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", fill_disk)
    with pytest.raises(OSError, match="No space left"):
        lora.save_lora(tmp_path / "lora.safetensors", pairs, config)
    assert (tmp_path / "lora.safetensors").read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["lora.safetensors"]


def test_the_shipped_lora_draws_bow_ties_and_forgets_nothing():
    """A few of the images of the record ``score/finetune``, far below its scores."""
    few = {kind: named[:8] for kind, named in scores.captions_of("shapes-sd").items()}
    found = scores.score(scores.read_images("shapes-sd", SHIPPED, few), few)
    assert min(found.values()) >= 0.5, found
    assert SHIPPED.stat().st_size + words.word_file(SHIPPED).stat().st_size <= 1.5e6


def test_the_record_has_every_seed_of_both_models():
    rows = read_record("score/finetune")
    assert [row["question"] for row in rows] == scores.questions(rows)


def runs_of(model: str, way: str) -> list[dict]:
    """What was recorded of a model's seeds."""
    rows = read_record("score/finetune")
    wanted = {"model": model, "way": way}
    return [row["answer"] for row in rows if wanted.items() <= row["question"].items()]


def test_stable_diffusion_learned_what_the_course_promises():
    (before,) = runs_of("shapes-sd", "before")
    rehearsals = runs_of("shapes-sd", "with rehearsal")
    for rehearsed, forgetful in zip(
        rehearsals, runs_of("shapes-sd", "without rehearsal"), strict=True
    ):
        assert rehearsed["colors of the examples"] >= 0.85
        assert rehearsed["other colors"] >= 0.75
        assert rehearsed["old captions"] >= round(before["old captions"] - 0.03, 2)
        assert rehearsed["old captions"] > forgetful["old captions"]
        assert rehearsed["bytes"] <= 1.5e6


def test_klein_learned_the_shape_and_kept_most_of_the_others():
    (before,) = runs_of("shapes-flux2", "before")
    for run in runs_of("shapes-flux2", "with rehearsal"):
        assert min(run["colors of the examples"], run["other colors"]) >= 0.5
        assert run["old captions"] >= before["old captions"] - 0.15
        assert run["bytes"] <= 1e6


def test_pytorch_draws_the_same_with_the_shipped_files():
    recorded = np.load(FIXTURES / "pytorch-finetune.npz")
    params, config, tokenize = words.read_word(SHIPPED, *sd.load(SOURCE))
    prompts = [str(prompt) for prompt in recorded["prompts"]]
    ids = tokenize(prompts)
    assert np.array_equal(ids[:, 0], recorded["ids"])
    merged = merge(params, lora.read_lora(SHIPPED, params, config))
    latents, empty = np.moveaxis(recorded["latents"], 1, -1), tokenize([""])
    draw = jax.jit(
        lambda params: sd.generate(params, config, ids, jax.random.key(0), empty, 10, 3.0, latents)
    )
    found = 255 * np.asarray(draw(merged))
    assert np.abs(found - recorded["images"] / np.float32(257)).max() < 1
    assert [judge.read_scene(image / 255, scenes.NEW_SHAPES).shape for image in found] == [
        "bowtie"
    ] * len(found)
