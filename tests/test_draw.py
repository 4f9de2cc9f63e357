"""Many prompts on several actors: what comes out, and what is said when something goes wrong.

Chapter 10 kills an actor and draws what is missing: it compares the images bit for bit.
"""

import json
import os
import shutil
import signal
import sys
import threading
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image

from course import draw
from course.shapes import scenes
from lab.site import lock

LINES = [
    "a large red heart on a white background",
    "",
    "a large blue star on a white background",
    "画一颗红色的心",
    "a red heart 🚀",
    "a large " + "red " * 123,  # 500 letters
    "a large black cross on a white background",
    "a large green ring on a white background",
]
DRAWN = [number for number, line in enumerate(LINES) if line]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    file = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    file.write_text("\n".join(LINES) + "\n", encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def ray():
    """Ray on this machine, for all tests that need it."""
    ray = pytest.importorskip("ray", reason="Ray has no wheel for this Python on this system.")
    if hasattr(os, "sched_setaffinity"):
        # Ray gives its processes a fixed time to start, which one core alone may not suffice for.
        own_cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, range(os.cpu_count()))
        draw.start_ray(cpus=2)
        os.sched_setaffinity(0, own_cores)
    else:
        draw.start_ray(cpus=2)
    yield ray
    ray.shutdown()


def parse(prompts, out, *arguments):
    return draw.draw_parser().parse_args([str(prompts), str(out), *map(str, arguments)])


def read_png(content) -> tuple[np.ndarray, dict]:
    with Image.open(content) as image:
        return np.asarray(image), image.info


@pytest.fixture(scope="module")
def by_one(ray, prompts, tmp_path_factory):
    """The folder that one actor has filled, whose batches are not full."""
    out = tmp_path_factory.mktemp("one")
    draw.draw_missing(parse(prompts, out, "--actors", 1, "--batch", 2))
    return out


def test_an_image_says_what_it_follows_from(by_one, checkpoint):
    names = [draw.image_name(number) for number in DRAWN]
    assert sorted(file.name for file in by_one.iterdir()) == [*names, "settings.json"]
    for number in DRAWN:
        pixels, texts = read_png(by_one / draw.image_name(number))
        assert pixels.shape == (checkpoint.height, checkpoint.width, 3)
        assert texts == {
            "prompt": LINES[number].strip(),
            "number": str(number),
            "key": texts["key"],
            "checkpoint": "shapes-sd",
            "seed": "0",
            "steps": "15",
            "guidance": "3.0",
        }


def test_two_actors_draw_the_same_images_and_each_once(by_one, prompts, tmp_path, capsys):
    options = parse(prompts, tmp_path, "--actors", 2, "--batch", 2)
    draw.draw_missing(options)
    output = capsys.readouterr()
    assert "7 prompts, of which 0 are drawn already" in output.out
    assert "The bundled checkpoint never saw '画一颗红色的心'" in output.err
    assert "has 125 tokens, and 75 are read" in output.err
    assert output.err.count("has 125 tokens") == 1
    for number in DRAWN:
        pixels, texts = read_png(tmp_path / draw.image_name(number))
        other_pixels, other_texts = read_png(by_one / draw.image_name(number))
        assert np.array_equal(pixels, other_pixels)
        assert texts == other_texts
    draw.draw_missing(options)
    assert "7 prompts, of which 7 are drawn already" in capsys.readouterr().out


def test_a_batch_too_large_for_memory_is_named_and_the_rest_stays(by_one, prompts, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(by_one, out)
    (out / draw.image_name(0)).unlink()
    with pytest.raises(RuntimeError) as error:
        draw.draw_missing(parse(prompts, out, "--batch", 200_000))
    sentence, rest = str(error.value).splitlines()
    assert sentence.startswith("200000 images at a time need more memory than")
    assert sentence.endswith("give a --batch below 200000.")
    assert rest == "0 images were drawn, and 1 are missing: start the same again for these."
    assert len(list(out.glob("*.png"))) == len(DRAWN) - 1


def test_weights_that_an_actor_cannot_load_are_named(ray, prompts, checkpoint, tmp_path):
    damaged = shutil.copytree(checkpoint.source, tmp_path / "damaged")
    weights = damaged / "unet" / "diffusion_flax_model.msgpack"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(
        RuntimeError, match=rf"The actor on .* cannot load {damaged}: .* is damaged"
    ):
        draw.draw_missing(parse(prompts, tmp_path / "out", "--checkpoint", damaged))


def test_edits_by_flux2_survive_an_actor_that_dies_and_go_on_with_the_same_bits(
    ray, tmp_path, monkeypatch
):
    folder, out = tmp_path / "pictures", tmp_path / "out"
    scenes.write_folder(scenes.training_scenes(3, seed=1), folder)
    file = tmp_path / "wishes.jsonl"
    wishes = ["blue", "a star", "a black background"]
    lines = [{"file_name": f"00{n}.png", "prompt": wish} for n, wish in enumerate(wishes)]
    file.write_text("\n".join(map(json.dumps, lines)))
    arguments = ("--edit", folder, "--checkpoint", "shapes-flux2", "--steps", 2, "--batch", 2)
    options = parse(file, out, *arguments)

    # Without Ray, and in two batches.
    rows = draw.add_pictures(draw.read_prompts(file), file, folder)
    settings, _ = draw.choose_settings(options)
    actor = draw.Draw(settings, partial(draw.write_pngs, folder=out, settings=settings))
    out.mkdir()
    for some in (rows[:2], rows[2:]):
        actor({name: np.array([row[name] for row in some]) for name in some[0]})
    drawn = {image.name: image.read_bytes() for image in out.glob("*.png")}
    assert len(drawn) == 3
    pixels, texts = read_png(out / draw.image_name(1))
    assert pixels.shape == (64, 64, 3) and texts["edited"].startswith("001.png ")

    # With Ray, the missing two are one batch.
    first, *missing = sorted(out.glob("*.png"))
    written_at = first.stat().st_mtime_ns
    for image in missing:
        image.unlink()
    died, write_pngs = tmp_path / "died", draw.write_pngs

    def write_or_die(rows, folder, settings):
        if not died.exists():
            write_pngs({name: values[:1] for name, values in rows.items()}, folder, settings)
            died.touch()
            os._exit(1)
        write_pngs(rows, folder, settings)

    monkeypatch.setattr(draw, "write_pngs", write_or_die)
    draw.draw_missing(options)
    assert died.exists()
    assert {image.name: image.read_bytes() for image in out.glob("*.png")} == drawn
    assert first.stat().st_mtime_ns == written_at

    shutil.copyfile(folder / "000.png", folder / "001.png")
    with pytest.raises(RuntimeError, match=r"is there already with the edited '001\.png"):
        draw.draw_missing(options)


# Without Ray.


@pytest.mark.parametrize(
    ("name", "contents", "sentence"),
    [
        ("wishes.txt", "blue", "lines of a text have no file_name, so write them as .csv or"),
        (
            "wishes.csv",
            "prompt\nblue\n",
            r"columns are \['prompt'\], and none is called 'file_name'",
        ),
        (
            "wishes.csv",
            "prompt,file_name\nblue,\n",
            "Row 0 of .*wishes.csv names no picture: write",
        ),
        ("wishes.csv", "prompt,file_name\nblue,b.png\n", "Row 0 of .* edits .*b.png, which is not"),
        (
            "wishes.csv",
            f"prompt,file_name\nblue,{'make the heart blue ' * 50}\n",
            r"Row 0 of .* edits .* \.\.\., which is not there: correct the name, or --edit",
        ),
        (
            "wishes.csv",
            f"prompt,file_name\nblue,{__file__}\n",
            r"edits .*test_draw\.py, which is outside of .*: put it there, or correct --edit",
        ),
        ("wishes.csv", "prompt,file_name\nblue,a.png\n", "a.png is damaged, or no image in PNG"),
    ],
)
def test_prompts_without_a_picture_to_edit_are_refused(tmp_path, name, contents, sentence):
    (tmp_path / name).write_text(contents)
    (tmp_path / "a.png").write_text("<html>")
    with pytest.raises(RuntimeError, match=sentence):
        draw.draw_missing(parse(tmp_path / name, tmp_path / "out", "--edit", tmp_path))


def test_stable_diffusion_is_not_asked_to_edit_by_prompts(prompts, tmp_path):
    with pytest.raises(
        RuntimeError, match="shapes-sd is Stable Diffusion, which edits no pictures"
    ):
        draw.choose_settings(parse(prompts, tmp_path, "--edit", tmp_path))


def test_every_python_of_the_lock_has_ray():
    for python in lock.PYTHONS:
        assert {"ray", "pandas", "pyarrow"} <= set(lock.locked_versions(python))


def test_without_ray_the_command_says_how_to_get_it(prompts, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RuntimeError, match=r"Ray is not installed here: run `pip install \"ray"):
        draw.draw_missing(parse(prompts, tmp_path))


@pytest.mark.parametrize(
    ("name", "contents", "message"),
    [
        ("prompts.txt", None, "cannot be read"),
        ("prompts.txt", b"\n  \n", "no prompts in"),
        ("prompts.txt", b"a caf\xe9", "cannot be read"),
        (
            "prompts.csv",
            b"text,seed\na red heart,1\n",
            r"columns are \['text', 'seed'\], and none is",
        ),
        ("prompts.csv", b"prompt,prompt\na,b\n", "two of its columns are called 'prompt'"),
        ("prompts.jsonl", b'{"prompt": "a"}\n{"text": "b"}\n', "line 2 has no key 'prompt'"),
        ("prompts.jsonl", b"a red heart\n", "cannot be read"),
        ("prompts.jsonl", b"[" * 10**5, "cannot be read"),
        ("prompts.jsonl", b'{"prompt": ["a"]}', r"are no texts: row 0 is \['a'\]"),
        ("prompts.jsonl", b'{"prompt": "a \\ud83d heart"}', "surrogates not allowed"),
        ("prompts.json", b'["a red heart"]', r"\.json is not read, so save them as \.txt"),
    ],
)
def test_prompts_that_cannot_be_had_are_refused(tmp_path, name, contents, message):
    if contents is not None:
        (tmp_path / name).write_bytes(contents)
    with pytest.raises(RuntimeError, match=message):
        draw.read_prompts(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "contents"),
    [
        ("prompts.csv", 'seed,prompt\n1,"a red heart, large"\n2,\n3,a blue star\n'),
        ("prompts.TSV", "prompt\tseed\na red heart, large\t1\n\t2\na blue star\t3\n"),
        ("prompts.jsonl", '{"prompt": "a red heart, large"}\n\n{"prompt": "a blue star"}\n'),
    ],
)
def test_prompts_come_from_a_column_or_a_key(tmp_path, name, contents):
    (tmp_path / name).write_text(contents)
    assert draw.read_prompts(tmp_path / name) == [
        {"number": 0, "prompt": "a red heart, large"},
        {"number": 2, "prompt": "a blue star"},
    ]


def test_a_file_that_would_fill_the_memory_is_refused(tmp_path, monkeypatch):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    # A few kilobytes, as the text stands there once.
    text = pyarrow.DictionaryArray.from_arrays(np.zeros(100, np.int32), ["a" * 10**6])
    file = tmp_path / "prompts.parquet"
    parquet.write_table(pyarrow.table({"prompt": text}), file)
    assert file.stat().st_size < 10**5
    monkeypatch.setattr(draw, "MOST_TEXT", 10**7)
    with pytest.raises(RuntimeError, match=r"cannot be read: it has more than .* split it"):
        draw.read_prompts(file)
    monkeypatch.setattr(draw, "MOST_ROWS", 3)
    (tmp_path / "prompts.txt").write_text("a star\n" * 4)
    with pytest.raises(RuntimeError, match="more than 3 rows or 10000000 letters, so split it"):
        draw.read_prompts(tmp_path / "prompts.txt")


def test_a_pipe_is_read_to_its_end_if_it_has_one(tmp_path, monkeypatch):
    if not Path("/dev/zero").is_char_device():
        pytest.skip("This system has no device without an end.")
    monkeypatch.setattr(draw, "MOST_TEXT", 10**7)
    with pytest.raises(RuntimeError, match="has more than 10000000 letters, so split it"):
        draw.read_prompts(Path("/dev/zero"))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=["a red heart\r\na blue star\n"])
    writer.start()
    assert [row["prompt"] for row in draw.read_prompts(pipe)] == ["a red heart", "a blue star"]
    writer.join()


def test_prompts_come_from_parquet_as_well(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    table = pyarrow.table({"prompt": ["a red heart", None, "a blue star"], "other": [1, 2, 3]})
    parquet.write_table(table, tmp_path / "prompts.parquet")
    assert draw.read_prompts(tmp_path / "prompts.parquet") == [
        {"number": 0, "prompt": "a red heart"},
        {"number": 2, "prompt": "a blue star"},
    ]
    for column, message in (
        (pyarrow.table({"text": ["a"]}), "cannot be read"),
        (
            pyarrow.table({"prompt": [1]}),
            "are no texts: row 0 is 1",
        ),
    ):
        parquet.write_table(column, tmp_path / "other.parquet")
        with pytest.raises(RuntimeError, match=message):
            draw.read_prompts(tmp_path / "other.parquet")


@pytest.mark.parametrize(("name", "status"), [("SIGINT", 130), ("SIGTERM", 143)])
@pytest.mark.skipif(sys.platform == "win32", reason="Windows ends processes without asking them.")
def test_a_run_that_is_told_to_end_says_how_to_go_on(
    prompts, tmp_path, monkeypatch, capsys, name, status
):
    pytest.importorskip("ray", reason="Ray has no wheel for this Python on this system.")

    class Drawn:
        def iter_batches(self, batch_size):
            write_black(tmp_path, draw.Settings("shapes-sd"))
            os.kill(os.getpid(), getattr(signal, name))
            yield

    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a job in the background lacks

    def start_ray(*_):  # which sets handlers of its own
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    monkeypatch.setattr(draw, "start_ray", start_ray)
    monkeypatch.setattr(draw, "plan_actors", lambda *_: {"actors": 1})
    monkeypatch.setattr(draw, "draw_rows", lambda *_, **__: Drawn())
    assert draw.main([str(prompts), str(tmp_path)]) == status
    output = capsys.readouterr()
    assert output.err.endswith(
        "Interrupted: started again, the same command draws what is missing.\n"
    )
    assert sorted(file.name for file in tmp_path.iterdir()) == ["0000000.png", "settings.json"]


def test_images_that_do_not_arrive_are_counted(tmp_path, monkeypatch, capsys):
    """As of actors on other machines, whose folder of this name is their own."""
    pytest.importorskip("ray", reason="Ray has no wheel for this Python on this system.")

    prompts, out = tmp_path / "prompts.txt", tmp_path / "out"
    prompts.write_text("a red heart\na blue star\na green ring\n")

    class Drawn:
        def iter_batches(self, batch_size):
            write_black(out, draw.Settings("shapes-sd"))
            return []

    monkeypatch.setattr(draw, "start_ray", lambda *_: None)
    monkeypatch.setattr(draw, "plan_actors", lambda *_: {"actors": 1})
    monkeypatch.setattr(draw, "draw_rows", lambda *_, **__: Drawn())
    assert draw.main([str(prompts), str(out)]) == 1
    assert f"2 images are not in {out}: they may lie" in capsys.readouterr().err


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_an_image_that_is_not_finite_is_not_written(number):
    image = np.full((1, 8, 8, 3), 0.5, np.float32)
    assert (draw.to_bytes(image) == 128).all()
    image[0, 0, 0, 0] = number
    with pytest.raises(RuntimeError, match="An image has values that are not finite"):
        draw.to_bytes(image)


def test_a_folder_that_cannot_be_written_is_refused_at_once(prompts, capsys):
    assert draw.main([str(prompts), str(prompts / "out")]) == 1
    assert "out cannot be written (Not a directory): make room, or give" in capsys.readouterr().err


def write_black(folder, settings):
    """Write a black image for the prompt 0, "a red heart"."""
    image = np.zeros((1, 8, 8, 3), np.uint8)
    batch = {"number": np.array([0]), "prompt": np.array(["a red heart"]), "image": image}
    draw.write_pngs(batch, folder, settings)


def test_images_of_other_work_are_not_taken_for_ones_own(tmp_path):
    settings = draw.Settings("shapes-sd")
    rows = [{"number": 0, "prompt": "a red heart"}, {"number": 1, "prompt": "a blue star"}]
    write_black(tmp_path, settings)
    assert draw.find_missing(tmp_path, rows, settings) == rows[1:]
    others = [
        ([{"number": 0, "prompt": "a green ring"}], settings),
        (rows, draw.Settings("shapes-sd", seed=1)),
    ]
    for other_rows, other_settings in others:
        with pytest.raises(RuntimeError, match="is there already with the"):
            draw.find_missing(tmp_path, other_rows, other_settings)
    with pytest.raises(RuntimeError, match="none of these prompts'"):
        draw.find_missing(tmp_path, rows[1:], settings)
    with pytest.raises(RuntimeError, match=r"0000001\.png cannot be read \(it is no file\)"):
        (tmp_path / draw.image_name(1)).mkdir()
        draw.find_missing(tmp_path, rows, settings)
    (tmp_path / draw.image_name(1)).rmdir()
    (tmp_path / draw.image_name(1)).write_bytes(b"no image")
    with pytest.raises(RuntimeError, match=r"0000001\.png cannot be read"):
        draw.find_missing(tmp_path, rows, settings)


def test_settings_are_kept_once_and_taken_from_images_where_they_are_not(tmp_path):
    """A folder may be older than settings.json, or be filled without the command."""
    settings, rows = draw.Settings("shapes-sd"), [{"number": 0, "prompt": "a red heart"}]
    kept = tmp_path / draw.SETTINGS_FILE
    kept.write_text(json.dumps(settings.texts()))
    other = draw.Settings("shapes-sd", steps=8)
    for any_settings in (settings, other):  # as there are no images yet
        assert draw.find_missing(tmp_path, rows, any_settings) == rows
    write_black(tmp_path, settings)
    assert draw.find_missing(tmp_path, rows, settings) == []
    with pytest.raises(RuntimeError, match=r"settings\.json is .* with the steps '15', not '8'"):
        draw.find_missing(tmp_path, rows, other)
    for damaged, sentence in (("{", "cannot be read .*: remove"), ("[]", "holds no settings")):
        kept.write_text(damaged)
        with pytest.raises(RuntimeError, match=rf"settings\.json {sentence}"):
            draw.find_missing(tmp_path, rows, settings)
    os.truncate(kept, 2**36)
    with pytest.raises(RuntimeError, match=r"settings\.json cannot be read .*68719 MB"):
        draw.find_missing(tmp_path, rows, settings)


def test_an_image_of_another_seed_is_none_of_a_folders_own(tmp_path):
    settings, rows = draw.Settings("shapes-sd"), [{"number": 0, "prompt": "a red heart"}]
    write_black(tmp_path, draw.Settings("shapes-sd", seed=1))
    (tmp_path / draw.SETTINGS_FILE).write_text(json.dumps(settings.texts()))
    with pytest.raises(RuntimeError, match=r"0000000\.png is there already with the seed '1'"):
        draw.find_missing(tmp_path, rows, settings)


@pytest.mark.parametrize(
    ("option", "value", "sentence"),
    [
        ("--batch", "0", "argument --batch: 0 is too small: give at least 1"),
        ("--steps", "3000000000", "argument --steps: 3000000000 is too large: give less than"),
        ("--guidance", "nan", "argument --guidance: nan is no finite number of 32 bits: give one"),
        ("--patience", "1e39", "argument --patience: 1e39 is no finite number of 32 bits"),
        ("--patience", "0", "argument --patience: 0 is too short: give seconds above 0"),
    ],
)
def test_a_number_out_of_range_is_refused(prompts, tmp_path, capsys, option, value, sentence):
    with pytest.raises(SystemExit, match="2"):
        draw.main([str(prompts), str(tmp_path), option, value])
    assert sentence in capsys.readouterr().err


def test_settings_have_the_seeds_that_make_keys_of_their_own():
    assert draw.Settings("shapes-sd", seed=2**32 - 1).seed == 2**32 - 1
    with pytest.raises(ValueError, match=r"The seed is 4294967296: give .* to 4294967295"):
        draw.Settings("shapes-sd", seed=2**32)
    with pytest.raises(ValueError, match="The guidance is nan: give a finite number"):
        draw.Settings("shapes-sd", guidance=float("nan"))


def test_a_key_follows_from_the_seed_and_the_number_alone():
    keys = draw.image_keys(0, np.arange(4))
    assert len(set(map(tuple, np.asarray(jax.random.key_data(keys))))) == 4
    assert draw.image_keys(0, np.array([3]))[0] == keys[3]
    assert draw.image_keys(1, np.array([3]))[0] != keys[3]
