"""The TPU compiler, asked without a TPU: what it says about any function, about pipelines, and what was recorded."""

import dataclasses
import doctest
import importlib.metadata
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import jsonschema
import numpy as np
import pytest
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks import record_tpu
from course import tpu
from course.tpu import chips, compiler, model, pipelines, reports
from course.tpu.__main__ import main, parse_shape
from course.tpu.pipelines import Program, load_shapes, take_apart, tree_bytes

ROOT = Path(__file__).resolve().parents[1]
RECORDED = {file.stem: file for file in sorted(record_tpu.FOLDER.glob("*.json"))}
each_record = pytest.mark.parametrize("name", RECORDED)
MIB, GIB = 2**20, 2**30
V5E = tpu.Chip("v5e", 197e12, 820e9, 128 * MIB, int(15.75 * GIB))
# libtpu exists for no other system, which the tests of its absence check everywhere.
needs_compiler = pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"), reason="the TPU compiler runs on Linux on x86-64"
)


def shape(*sides, dtype="float32", **options):
    return jax.ShapeDtypeStruct(sides, dtype, **options)


def split_over(chips):
    return NamedSharding(Mesh(np.array(tpu.tpu_devices("v5e", chips)), ("chips",)), PartitionSpec("chips"))


# Any function


@needs_compiler
def test_the_page_about_functions_of_ones_own_is_true():
    page = ROOT / "docs" / "ask-the-compiler.md"
    result = doctest.testfile(str(page), module_relative=False)
    assert result.attempted > 10
    assert result.failed == 0


@needs_compiler
def test_plain_jitted_and_pmapped_functions_give_the_same_answer():
    def double(x, y):
        return x @ y

    # Of arrays only the shape counts, wherever they lie.
    plain = tpu.ask_compiler(double, jnp.ones((256, 256)), shape(256, 256))
    jitted = tpu.ask_compiler(jax.jit(double), shape(256, 256), shape(256, 256))
    on_eight = jax.pmap(double, devices=tpu.tpu_devices("v5e", 8))
    pmapped = tpu.ask_compiler(on_eight, shape(8, 256, 256), shape(8, 256, 256))
    assert plain.work == jitted.work
    assert plain.memory == jitted.memory
    for answer in (plain, pmapped):
        assert answer.work.flops == pytest.approx(2 * 256**3, rel=0.01)
        assert answer.work.least_bytes == 3 * 256**2 * 4
        assert (answer.memory.arguments, answer.memory.output) == (2 * 256**2 * 4, 256**2 * 4)


@needs_compiler
def test_arguments_that_are_not_read_need_room_too():
    def ignore(x, unread):
        return x + 1

    x = shape(1024, 1024)
    sizes = {
        "whole": tpu.ask_compiler(ignore, x, {"a": shape(2048, 1024), "b": None}),
        "split": tpu.ask_compiler(ignore, x, shape(4 * 2048, 1024, sharding=split_over(4))),
        "pmapped": tpu.ask_compiler(
            jax.pmap(ignore, devices=tpu.tpu_devices("tpu7x", 1)),
            shape(2, 1024, 1024),
            shape(2, 2048, 1024),
            chip="tpu7x",
        ),
    }
    assert {how: report.memory.arguments / MIB for how, report in sizes.items()} == dict.fromkeys(sizes, 4 + 8)
    full = tpu.ask_compiler(ignore, x, shape(2**20, 4096))
    assert full.verdict == "It does not fit: it takes 16.01 GiB on each device, of 15.75 GiB."


@needs_compiler
def test_a_donated_argument_and_its_output_count_once():
    report = tpu.ask_compiler(jax.jit(lambda x: x + 1, donate_argnums=0), shape(1024, 1024))
    assert (report.memory.arguments, report.memory.output) == (4 * MIB, 0)


@needs_compiler
def test_temporaries_are_what_lies_in_hbm_between_two_operations():
    kept = jax.lax.optimization_barrier  # without it, no array would lie between the two
    report = tpu.ask_compiler(lambda x: kept(x + 1).sum(), shape(2**13, 2**14))
    assert report.memory.temporaries == pytest.approx(512 * MIB, rel=0.01)  # too large for any memory on the chip


def test_of_a_buffer_assignment_only_the_temporaries_in_hbm_count(tmp_path):
    with pytest.raises(RuntimeError, match="does not say how the compiler laid out one program's memory"):
        compiler.temporary_bytes(tmp_path)
    lines = ["allocation 6: size 4096, output shape is |f32[1024]|, maybe-live-out:", " value: <1 sin @0> (size=4096)"]
    lines += ["allocation 7: size 512, thread-local:", "allocation 8: size 2560, color 6, preallocated-temp:"]
    lines += ["allocation 9: size 9733632, preallocated-temp:", "allocation 10: size 512, constant:", ""]
    (tmp_path / "module_0003.jit_f.after_optimizations-buffer-assignment.txt").write_text("\n".join(lines))
    assert compiler.temporary_bytes(tmp_path) == 9733632


@needs_compiler
def test_a_program_for_other_devices_is_refused():
    with pytest.raises(ValueError, match=r"devices of the kind cpu, and not for v5e: give its `pmap`, mesh or"):
        tpu.ask_compiler(jax.pmap(lambda x: x + 1), shape(1, 8))
    with pytest.raises(ValueError, match=r"devices of the kind TPU v5 lite, and not for v6e"):
        tpu.ask_compiler(lambda x: x + 1, shape(8, sharding=split_over(4)), chip="v6e")


@needs_compiler
def test_a_python_number_is_an_argument_only_if_it_is_static():
    with pytest.raises(ValueError, match=r"give jax.ShapeDtypeStruct\(\(\), dtype\) in its place"):
        tpu.ask_compiler(lambda x, n: x * n, shape(8), 2)
    assert tpu.ask_compiler(jax.jit(lambda x, n: x * n, static_argnums=1), shape(8), 2).fits


@needs_compiler
def test_a_refusal_for_another_reason_than_size_is_an_error():
    class Refused:
        def lower(self, *_):
            return self

        def compile(self, compiler_options):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem")

        trace, args_info = None, ()

    with pytest.raises(jax.errors.JaxRuntimeError, match="vmem"):
        tpu.ask_compiler(Refused())


# Chips


@needs_compiler
@pytest.mark.parametrize("chip", tpu.CHIPS)
def test_each_chip_can_be_had_in_each_number(chip):
    for number in (1, 4, 8):
        devices = tpu.tpu_devices(chip, number)
        assert len(devices) == (2 * number if chip == "tpu7x" else number)
        assert {device.device_kind for device in devices} <= set(tpu.CHIPS[chip].device_kinds)
        assert {device.num_cores for device in devices} == {tpu.CHIPS[chip].cores}
        assert {device.process_index for device in devices} == {0}


@needs_compiler
@pytest.mark.parametrize("chip", tpu.CHIPS)
def test_the_compiler_confirms_how_much_memory_a_program_may_use(chip):
    refused = tpu.ask_compiler(lambda x: x + 1, shape(2**18, 2**18), chip=chip)
    assert not refused.fits
    # "exceeds available HBM (15.75G)", or "Used 512.00G of 15.75G hbm"
    assert re.search(r"(?:available HBM \(| of )([\d.]+)G", refused.message)[1] == f"{tpu.CHIPS[chip].usable_gib}"


@needs_compiler
@pytest.mark.parametrize(
    ("chip", "flops", "bandwidth"),  # of a chip, as Google documents it at cloud.google.com/tpu/docs
    [
        ("v4", 275e12, 1228e9),
        ("v5e", 197e12, 819e9),
        ("v5p", 459e12, 2765e9),
        ("v6e", 918e12, 1638e9),
        ("tpu7x", 2307e12, 7380e9),
    ],
)
def test_a_chips_figures_are_those_that_are_documented(chip, flops, bandwidth):
    devices = len(tpu.tpu_devices(chip))
    found = tpu.find_chip(chip)
    assert (found.peak * devices, found.bandwidth * devices) == pytest.approx((flops, bandwidth), rel=0.005)
    assert found.peak * devices >= flops and found.bandwidth * devices >= bandwidth  # for a bound must take the more
    assert 64 * MIB <= found.on_chip <= 160 * MIB


@pytest.mark.parametrize(("system", "machine"), [("Darwin", "arm64"), ("Windows", "AMD64"), ("Linux", "aarch64")])
def test_other_systems_get_one_sentence(monkeypatch, capsys, system, machine):
    chips.find_chip.cache_clear()
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert main(["shapes-sd"]) == 1
    said = capsys.readouterr().err
    assert f"and this is {system} on {machine}" in said
    assert said.count("\n") == 1


@needs_compiler
def test_without_libtpu_the_command_that_installs_it_is_given(monkeypatch, capsys):
    chips.find_chip.cache_clear()
    monkeypatch.setattr(chips.importlib.util, "find_spec", lambda name: None)
    assert main(["shapes-sd"]) == 1
    said = capsys.readouterr().err
    assert "pip install 'jax[tpu]'" in said
    assert said.count("\n") == 1


@needs_compiler
def test_with_an_old_jax_there_is_a_sentence_and_no_crash(monkeypatch):
    chips.find_chip.cache_clear()
    monkeypatch.setattr(jax, "__version_info__", (0, 7, 2))
    with pytest.raises(RuntimeError, match=r"can be asked from JAX 0\.9\.2 on, and this is .*: install a newer one"):
        tpu.tpu_devices()


@needs_compiler
def test_libtpu_held_by_another_process_gives_one_sentence():
    code = "import jax; jax.config.update('jax_platforms', 'cpu'); from course import tpu; tpu.tpu_devices(); "
    code += "print('held', flush=True); input()"
    # As on a machine with chips, where two processes at a time must not reach for them.
    environment = os.environ | {"ALLOW_MULTIPLE_LIBTPU_LOAD": "0"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    # A chapter that is executed beside the tests may hold libtpu, too. Then the holder ends at once, and has to wait.
    for _ in range(60):
        holder = subprocess.Popen([sys.executable, "-c", code], env=environment, text=True, **pipes)
        if holder.stdout.readline() == "held\n":
            break
        holder.wait()
    try:
        assert holder.poll() is None, "libtpu was held by a different process all the time"
        command = [sys.executable, "-m", "course.tpu", "jax.numpy:sin", "--shapes", "f32[8]"]
        second = subprocess.run(command, env=environment, capture_output=True, text=True)
    finally:
        holder.communicate("\n")
    assert second.returncode == 1
    assert second.stdout == ""
    assert second.stderr.splitlines()[-1].startswith("Another process holds libtpu: wait until it has ended")
    assert "Traceback" not in second.stderr


# Pipelines


@pytest.fixture(scope="module", params=["sd", "sdxl"])
def tiny(request, tmp_path_factory):
    """A folder with the configuration of a pipeline of either architecture that compiles in seconds."""
    folder = tmp_path_factory.mktemp("tiny") / request.param
    shutil.copytree(pipelines.CONFIGURATIONS / request.param, folder)
    text = {"hidden_size": 32, "intermediate_size": 37, "num_attention_heads": 4, "num_hidden_layers": 2}
    text |= {"projection_dim": 32, "vocab_size": 1000}
    one_level = {"block_out_channels": [32], "layers_per_block": 1}
    vae = one_level | {"down_block_types": ["DownEncoderBlock2D"], "up_block_types": ["UpDecoderBlock2D"]}
    unet = one_level | {"down_block_types": ["CrossAttnDownBlock2D"], "up_block_types": ["CrossAttnUpBlock2D"]}
    unet |= {"attention_head_dim": 4, "cross_attention_dim": 32, "sample_size": 8}
    if request.param == "sdxl":
        unet |= {"attention_head_dim": [4], "transformer_layers_per_block": [1], "cross_attention_dim": 64}
        unet |= {"projection_class_embeddings_input_dim": 32 + 6 * 256}
    changes = {"text_encoder": text, "text_encoder_2": text, "unet": unet, "vae": vae}
    for file in folder.glob("*/config.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | changes[file.parent.name]))
    return folder


# Chapter 8 finds the same for shapes-sd.
@needs_compiler
@pytest.mark.parametrize("tiny", ["sdxl"], indirect=True)
def test_the_parts_of_a_pipeline_on_eight_chips_add_up_to_the_whole(tiny):
    report = reports.ask_about_pipeline(Program(str(tiny), chips=8, steps=3))
    assert report.whole.fits
    # The loop's body counts once, so the parts add up once each.
    runs = {part.name: part.runs for part in report.parts}
    assert runs == {"text encoders": 1, "denoising step": 3, "VAE decoder": 1}
    assert sum(part.work.flops for part in report.parts) == pytest.approx(report.whole.work.flops, rel=0.02)
    assert report.times == tpu.find_times(report.parts, report.whole.chip)
    # Arguments are the parameters, also the VAE's encoder, which is not read.
    assert report.whole.memory.arguments >= sum(report.parameter_bytes.values())
    validate(dataclasses.asdict(report))
    assert reports.from_json(reports.PipelineReport, json.loads(json.dumps(dataclasses.asdict(report)))) == report


def test_weights_are_those_that_a_run_reads_whole(tiny):
    program = Program(str(tiny), steps=3)
    for piece in take_apart(program, load_shapes(str(tiny))):
        jaxpr = jax.make_jaxpr(piece.function)(*piece.arguments).jaxpr
        _, is_read = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
        weights = jax.tree.leaves_with_path(piece.arguments[0])
        # Of the tokens' embeddings a few rows are read.
        whole = [
            leaf
            for (path, leaf), read in zip(weights, is_read, strict=False)
            if read and "token_embedding" not in jax.tree_util.keystr(path)
        ]
        assert piece.weights == tree_bytes(whole), piece.name


shapes_of = cache(load_shapes)  # building them takes seconds


def parameters_of(model):
    """How many numbers each part of a pipeline has, counted from its configurations."""
    params = shapes_of(model, "float32").params
    return {part: tree_bytes(tree) // 4 for part, tree in params.items() if part != "scheduler"}


@pytest.mark.parametrize(
    ("model", "millions"),
    [
        ("sd", {"unet": 859.5, "text_encoder": 123.1, "vae": 83.7}),
        ("sdxl", {"unet": 2567.5, "text_encoder": 123.1, "text_encoder_2": 694.7, "vae": 83.7}),
    ],
)
def test_the_parameters_are_as_many_as_published(model, millions):
    counted = {part: number / 1e6 for part, number in parameters_of(model).items()}
    assert counted == pytest.approx(millions, abs=0.06)


def test_shapes_are_those_of_the_weights(params, checkpoint):
    shapes = shapes_of("shapes-sd", "float32")
    for part in ("unet", "vae", "text_encoder"):
        assert jax.tree.map(jnp.shape, params[part]) == jax.tree.map(lambda s: s.shape, shapes.params[part])
    assert load_shapes(checkpoint.source, "float32").params == shapes.params


def test_attention_is_laid_out_as_in_the_chapters():
    # Chapter 7 loads XL with split heads, although the checkpoint's configuration says otherwise.
    names = ("shapes-sd", "shapes-sdxl")
    layouts = {name: shapes_of(name, "float32").pipeline.unet.config.split_head_dim for name in names}
    assert layouts == {"shapes-sd": False, "shapes-sdxl": True}


def with_index(folder, to, **parts):
    """A copy of a pipeline's folder with another index, as PyTorch's pipelines write it."""
    shutil.copytree(folder, to)
    index = json.loads((to / "model_index.json").read_text())
    usual = {
        "feature_extractor": ["transformers", "CLIPFeatureExtractor"],
        "unet": ["diffusers", "UNet2DConditionModel"],
    }
    index |= usual | {"_class_name": index["_class_name"].removeprefix("Flax")} | parts
    (to / "model_index.json").write_text(json.dumps(index))
    return str(to)


def test_a_folder_made_with_pytorch_is_read_all_the_same(tiny, tmp_path):
    assert load_shapes(with_index(tiny, tmp_path / "copy")).params == load_shapes(str(tiny)).params


def test_a_scheduler_that_flax_has_not_is_named(tiny, tmp_path):
    folder = with_index(tiny, tmp_path / "copy", scheduler=["diffusers", "EulerAncestralDiscreteScheduler"])
    with pytest.raises(ValueError, match="has a EulerAncestralDiscreteScheduler, and there is no FlaxEulerAncestral"):
        load_shapes(folder)


@needs_compiler
def test_a_folder_that_lacks_a_file_is_refused_in_a_sentence(tiny, tmp_path, capsys):
    folder = with_index(tiny, tmp_path / "copy")
    (tmp_path / "copy" / "vae" / "config.json").unlink()
    assert main([folder]) == 1
    assert "No such file or directory" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("height", [72, 0, 4])
def test_a_size_that_the_unet_cannot_halve_is_refused(height):
    with pytest.raises(ValueError, match=rf"shapes-sd cannot draw {height} × 64 pixels: give multiples of \d+\."):
        pipelines.complete(Program("shapes-sd", height=height), shapes_of("shapes-sd", "float32"))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"dtype": "int8"}, "choose bfloat16 or float32"),
        ({"batch": 0}, "give at least 1"),
        ({"steps": 0}, "at least 1"),
    ],
)
def test_impossible_programs_are_refused(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        Program("sd", **settings)


def test_an_unknown_pipeline_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'nothing' is no pipeline: give sd, sdxl, shapes-sd"):
        load_shapes("nothing")
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "FlaxFluxPipeline"}))
    with pytest.raises(ValueError, match=r"is a FluxPipeline: only Stable Diffusion 1.x and XL have Flax pipelines"):
        load_shapes(str(tmp_path))


# The command


@needs_compiler
def test_the_command_takes_a_function_from_the_folder_it_is_started_in(tmp_path):
    (tmp_path / "mine.py").write_text("def add(x, y):\n    return x + y\n")
    command = [
        sys.executable,
        "-m",
        "course.tpu",
        "mine:add",
        "--shapes",
        "f32[1024,1024]",
        "float32[1024,1024]",
        "--json",
    ]
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    result = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    report = reports.from_json(compiler.Report, json.loads(result.stdout))
    assert (report.memory.arguments, report.work.flops) == (8 * MIB, 1024**2)
    assert result.stderr == "compiling add …\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bf16[8,128]", shape(8, 128, dtype="bfloat16")),
        ("i32[]", shape(dtype="int32")),
        ("uint8[3]", shape(3, dtype="uint8")),
        ("bool[2,2]", shape(2, 2, dtype="bool")),
    ],
)
def test_a_shape_is_written_as_jax_prints_it(text, expected):
    assert parse_shape(text) == expected


@needs_compiler
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["shapes-sd", "--chip", "v9"], "No chip 'v9' is known here: choose one of v4, v5e, v5p, v6e, tpu7x."),
        (["shapes-sd", "--chips", "3"], "3 chips cannot be asked for: choose 1, 4 or 8."),
        (["jax.numpy:sinn", "--shapes", "f32[8]"], "'jax.numpy:sinn' cannot be imported (module 'jax.numpy' has no"),
        (
            ["no_such:f", "--shapes", "f32[8]"],
            "'no_such:f' cannot be imported (No module named 'no_such'): give module",
        ),
        (["jax.numpy:sin", "--shapes", "f32(8)"], "'f32(8)' is no shape: write it as bf16[8,128], or as int32[]"),
        (["jax.numpy:sin", "--shapes", "f99[8]"], "'f99[8]' is no shape"),
        (["jax.numpy:matmul", "--shapes", "f32[8]", "f32[9]"], "jax.numpy:matmul does not take f32[8] f32[9]: dot_gen"),
    ],
)
def test_what_cannot_be_asked_gets_one_sentence(arguments, sentence, capsys):
    assert main(arguments) == 1
    said = capsys.readouterr().err
    assert said.startswith(sentence)
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [["jax.numpy:sin"], ["sd", "--shapes", "f32[8]"], ["jax.numpy:sin", "--shapes", "f32[8]", "--steps", "2"]],
)
def test_functions_take_shapes_and_pipelines_sizes(arguments, capsys):
    with pytest.raises(SystemExit):
        main(arguments)
    assert "a function needs --shapes, and a pipeline the other sizes" in capsys.readouterr().err


def answer(memory=None, message=""):
    """A report that no compiler had to be asked for: a GiB of each kind."""
    work = tpu.Work(1e12, 1e9, 2**30) if memory else None
    return compiler.Report(V5E, memory, work, message, 1.0, "2026-11-22", compiler.versions())


ACCEPTED = answer(tpu.Memory(*[GIB] * 4))
REFUSED = answer(message="RESOURCE_EXHAUSTED: Ran out of memory\nand more")


@needs_compiler
def test_the_command_prints_a_page_about_a_pipeline(monkeypatch, capsys):
    monkeypatch.setattr(pipelines, "ask_compiler", lambda *_, **__: ACCEPTED)
    assert main(["shapes-sd", "--chips", "8", "--steps", "20"]) == 0
    page = capsys.readouterr().out.splitlines()
    assert page[0] == "shapes-sd, 64 × 64 pixels, 20 steps, bfloat16, batch 1 on each device of 8 v5e chip(s)"
    assert page[1] == "It fits: it takes 4.00 GiB on each device, of 15.75 GiB."
    assert [line.split()[:3] for line in page if line.startswith("denoising step")] == [["denoising", "step", "20"]]
    assert "A call: At least 0.112 s, by its FLOPs; the estimate is 0.112 s." in page
    assert page[-1].startswith("Compiled in 1 s for v5e on 2026-11-22 by libtpu ")


@needs_compiler
def test_a_program_that_does_not_fit_is_reported_without_parts(monkeypatch, capsys):
    monkeypatch.setattr(pipelines, "ask_compiler", lambda *_, **__: REFUSED)
    assert main(["shapes-sd", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    validate(content)
    report = reports.from_json(reports.PipelineReport, content)
    assert (report.parts, report.times) == ((), None)
    verdict = "It does not fit. The compiler: RESOURCE_EXHAUSTED: Ran out of memory"
    assert str(report).splitlines()[1] == report.whole.verdict == verdict


def test_the_command_prints_what_is_recorded(capsys):
    assert main(["--recorded"]) == 0
    assert capsys.readouterr().out == reports.table_of(reports.recorded_reports()) + "\n"


def test_a_program_can_be_asked_about_without_the_packages_of_the_pipelines(monkeypatch):
    there, find, missing = compiler.versions(), importlib.metadata.distributions, {"diffusers", "transformers"}
    monkeypatch.setattr(
        importlib.metadata, "distributions", lambda name: iter(() if name in missing else find(name=name))
    )
    assert compiler.versions().keys() == there.keys() - missing


def test_the_table_has_a_row_for_each_program_and_its_largest_batch():
    program = Program("sdxl", height=1024, width=1024, steps=20, split_head_dim=True)
    memory = tpu.Memory(2 * GIB, MIB, 3 * MIB // 2, 0)
    parts = (tpu.Part("a", 20, tpu.Work(3e12, 1e9, 1), 1.0), tpu.Part("b", 1, tpu.Work(5e12, 1e9, 1), 1.0))
    times = compiler.Times(1.5, 0.5, 2.5)
    plain = reports.PipelineReport(program, answer(memory), {"text_encoder_2": 1}, parts, times)
    tried = [reports.Attempt(n, n < 3, memory if n < 3 else None, 8.0) for n in (1, 2, 3)]
    later = compiler.versions() | {"jax": "0.99"}
    searched = dataclasses.replace(plain, largest_batch=reports.LargestBatch(2, tuple(tried), "2026-11-24", later))
    other = dataclasses.replace(program, chip="v6e", split_head_dim=False)
    refused = reports.PipelineReport(other, REFUSED, {"text_encoder_2": 1}, (), None)
    table = reports.table_of([plain, searched, refused]).replace("\N{NO-BREAK SPACE}", " ")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("|")]
    name, sizes = "sdxl, 1024 × 1024, 20 steps, bfloat16", ["2,048.0", "1.0", "1.5", "0.0"]
    first = [name, "1 × v5e", "1", "yes", *sizes, "65,000", "1.5 s", "2.5 s", "1 s"]
    assert rows[2:] == [
        first,
        first,
        [name, "1 × v5e", "2, the largest", "yes", *sizes, "", "", "", "8 s"],
        [f"{name}, split_head_dim=False", "1 × v6e", "1", "no", *[""] * 7, "1 s"],
    ]
    used = compiler.versions()
    by = f"libtpu {used['libtpu']} with jax {used['jax']}, libtpu {used['libtpu']} with jax 0.99"
    assert table.endswith(f"Answered by {by}, from 2026-11-22 to 2026-11-24.")


# What is recorded


def read(name):
    return reports.from_json(reports.PipelineReport, json.loads(RECORDED[name].read_text()))


def validate(content):
    schema = json.loads((ROOT / "benchmarks" / "report.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(json.loads(json.dumps(content)), schema)


def test_everything_is_recorded():
    assert record_tpu.missing(record_tpu.programs(), record_tpu.FOLDER) == []
    assert RECORDED.keys() == record_tpu.programs().keys()


@each_record
def test_a_record_is_on_the_program_of_its_name(name):
    validate(json.loads(RECORDED[name].read_text()))
    program, recorded = record_tpu.programs()[name], read(name).program
    side = {"shapes-sd": 64, "sd": 512, "sdxl": 1024}[program.pipeline]
    heads = program.pipeline == "sdxl" if program.split_head_dim is None else program.split_head_dim
    assert recorded == dataclasses.replace(program, height=side, width=side, split_head_dim=heads)


@each_record
def test_recorded_parameters_are_those_of_the_configurations(name):
    report = read(name)
    each = {"bfloat16": 2, "float32": 4}[report.program.dtype]
    model = report.program.pipeline
    assert report.parameter_bytes == {part: number * each for part, number in parameters_of(model).items()}
    if (
        report.whole.fits
    ):  # the compiler adds inputs, and leaves room around small arrays, of which a small model is made
        room = 1.5 if model.startswith("shapes") else 1.05
        assert 1 <= report.whole.memory.arguments / sum(report.parameter_bytes.values()) < room


@each_record
def test_recorded_figures_follow_from_each_other(name):
    report = read(name)
    assert bool(report.parts) == report.whole.fits
    if not report.parts:
        return
    assert 0.98 < report.whole.work.flops / sum(part.work.flops for part in report.parts) < 1.02
    assert dataclasses.astuple(report.times) == pytest.approx(
        dataclasses.astuple(tpu.find_times(report.parts, report.whole.chip))
    )
    assert report.times.bound < report.times.estimate


def test_no_chip_talks_to_another_so_their_number_changes_nothing():
    one, eight = (read(f"shapes-sd-bfloat16-v5e-{chips}").whole for chips in ("1-chip", "8-chips"))
    assert one.memory.arguments == eight.memory.arguments
    assert one.memory.temporaries == pytest.approx(eight.memory.temporaries, rel=0.02)


@needs_compiler
def test_recorded_chips_have_the_figures_of_today():
    for report in reports.recorded_reports():
        assert report.whole.chip == tpu.find_chip(report.program.chip)


@pytest.mark.parametrize("name", [n for n, program in record_tpu.programs().items() if record_tpu.is_searched(program)])
def test_a_recorded_largest_batch_is_confirmed(name):
    report = read(name)
    fits = {entry.batch: entry.fits for entry in report.largest_batch.tried}
    assert not fits[report.largest_batch.largest + 1]
    assert report.largest_batch.largest == 0 or fits[report.largest_batch.largest]
    for entry in report.largest_batch.tried:
        assert entry.fits == bool(entry.memory and entry.memory.total <= report.whole.chip.usable_hbm)


def test_bounds_and_estimates_stand_beside_what_others_measured():
    times = reports.published_times(reports.recorded_reports())
    assert {published.chip for published, _ in times} == {"v4", "v5e", "v6e"}
    for published, found in times:
        assert 0.3 * published.seconds < found.bound < published.seconds
        assert 0.5 < found.estimate / published.seconds < 2


# The recorder


@pytest.mark.parametrize("start", [1, 2, 7, 20])
def test_the_search_finds_the_largest_number_that_fits(start):
    for largest in range(41):
        asked = []
        assert record_tpu.largest_that_fits(lambda n: asked.append(n) or n <= largest, start) == largest  # noqa: B023
        assert len(asked) <= 2 + 2 * math.log2(max(start, largest) + 1)


def test_a_search_records_what_it_compiled_and_spares_the_first_batch(monkeypatch):
    asked = []

    def answer_for(program, shapes):
        asked.append(program.batch)
        return ACCEPTED if program.batch <= 5 else REFUSED

    monkeypatch.setattr(record_tpu, "ask_about_whole", answer_for)
    monkeypatch.setattr(record_tpu, "load_shapes", lambda *_: None)
    program = Program("shapes-sd")
    report = reports.PipelineReport(program, ACCEPTED, {}, (), None)
    found = record_tpu.find_largest_batch(program, report, start=2)
    assert (found.largest, asked) == (5, [2, 4, 8, 6, 5])
    assert [(entry.batch, entry.fits) for entry in found.tried] == [
        (1, True),
        (2, True),
        (4, True),
        (5, True),
        (6, False),
        (8, False),
    ]
    refused = dataclasses.replace(report, whole=REFUSED)
    assert record_tpu.find_largest_batch(program, refused, start=2).largest == 0
    assert len(asked) == 5


def test_the_most_useful_is_recorded_first(tmp_path):
    left = record_tpu.missing(record_tpu.programs(), tmp_path)
    real = [(name, what) for name, what in left if not name.startswith("shapes")]
    assert real[:3] == [(name, "report") for name in ("sd-bfloat16-v5e", "sdxl-bfloat16-v5e", "sdxl-bfloat16-v4")]
    assert real[-12:] == [(name, "largest batch") for name, _ in real[:12]]


def test_the_recorder_names_what_is_left_to_do(capsys, tmp_path):
    assert record_tpu.main(["--list", "--to", str(tmp_path)]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) == len(record_tpu.programs())
    assert sum("report, largest batch to do" in line for line in listed) == 12
    with pytest.raises(SystemExit):
        record_tpu.main(["--start", "0"])
    assert "--start is 0, and has to be 1 or more" in capsys.readouterr().err


def test_the_recorder_writes_each_answer_and_goes_on_after_a_program_that_fails(monkeypatch, capsys, tmp_path):
    def ask(program):
        if program.chip == "v4":
            raise jax.errors.JaxRuntimeError("INTERNAL: no such thing")
        return reports.PipelineReport(program, ACCEPTED, {}, (), None)

    found = reports.LargestBatch(3, (), "2026-11-22", {})
    monkeypatch.setattr(tpu, "tpu_devices", lambda: None)
    monkeypatch.setattr(record_tpu, "ask_about_pipeline", ask)
    monkeypatch.setattr(record_tpu, "find_largest_batch", lambda program, report, start: found)
    assert record_tpu.main(["--only", "sdxl-bfloat16-v", "--to", str(tmp_path)]) == 1
    assert capsys.readouterr().out == "Left to do: 0. Failed: sdxl-bfloat16-v4.\n"
    names = {"sdxl-bfloat16-v5e", "sdxl-bfloat16-v5e-other-heads", "sdxl-bfloat16-v6e"}
    assert {file.stem for file in tmp_path.iterdir()} == names
    content = json.loads((tmp_path / "sdxl-bfloat16-v6e.json").read_text())
    assert reports.from_json(reports.PipelineReport, content).largest_batch == found


@needs_compiler
def test_two_chips_that_share_a_step_exchange_answers_and_nothing_else():
    """The bundled model's, as it is recorded for Stable Diffusion XL in ``benchmarks/faster.json``."""
    drawing = model.Drawing("shapes-sd")
    report = model.ask(drawing, model.take_shared(drawing)).report
    (exchanged,) = report.collectives
    assert (exchanged.kind, exchanged.bytes) == ("all-gather", 2 * 8 * 8 * 4 * 4)
    assert "Devices exchange 2,048 bytes: 1 × all-gather" in str(report)
