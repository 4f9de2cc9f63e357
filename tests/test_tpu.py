"""The TPU compiler, asked without a TPU: programs compile, bytes add up, and each problem is one sentence."""

import json
import os
import platform
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import jsonschema
import pytest
from jax.sharding import SingleDeviceSharding

from benchmarks import record_tpu
from helpers import tpu
from helpers.tpu import compiler, programs, reports
from helpers.tpu.__main__ import main

ROOT = Path(__file__).resolve().parents[1]
RECORDED = sorted((ROOT / "benchmarks" / "tpu").glob("*.json"))
each_report = pytest.mark.parametrize("file", RECORDED, ids=lambda file: file.stem)


# libtpu exists for no other system, which the tests of its absence check everywhere.
needs_compiler = pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"), reason="the TPU compiler runs on Linux on x86-64"
)


# Chapters 4 and 5 run the first program, chapter 7 the second, each in the dtype of its checkpoint.
@needs_compiler
@pytest.mark.parametrize(("pipeline", "dtype"), [("shapes-sd", "float32"), ("shapes-sdxl", "bfloat16")])
def test_a_chapters_program_compiles_for_eight_chips_and_for_one_alike(pipeline, dtype):
    eight, one = (tpu.memory_report(tpu.Program(pipeline, "v5e", chips, steps=2, dtype=dtype)) for chips in (8, 1))
    assert eight["fits"] and one["fits"]
    for kind in ("parameters", "temporaries", "output"):  # no chip talks to another, so their number changes nothing
        assert eight["hbm"][kind] == pytest.approx(one["hbm"][kind], rel=0.01)
    assert eight["whole"]["flops"] == pytest.approx(one["whole"]["flops"], rel=0.01)


@needs_compiler
def test_the_program_with_shardings_compiles_for_eight_chips():
    program = tpu.Program("shapes-sd", "v5e", 8, batch=2, steps=2, parallel="jit")
    answer = tpu.memory_report(program)
    assert answer["fits"]
    pictures = 2 * 64 * 64 * 3 * 4  # each chip gets its share of the output, in float32, which it may lay out larger
    assert pictures <= answer["hbm"]["output"] < 8 * pictures


@needs_compiler
def test_temporaries_are_what_lies_in_hbm_between_two_operations(tmp_path):
    side = 2**14  # a matrix of 512 MiB, which fits into no memory on the chip itself
    x = jax.ShapeDtypeStruct((side, side), jnp.bfloat16, sharding=SingleDeviceSharding(tpu.tpu_devices()[0]))
    jax.jit(lambda x: jnp.sin(x @ x) @ x).lower(x).compile(compiler_options={"xla_dump_to": str(tmp_path)})
    assert tpu.temporary_bytes(tmp_path) == pytest.approx(2 * side**2, rel=0.01)


def test_of_a_buffer_assignment_only_the_temporaries_in_hbm_count(tmp_path):
    with pytest.raises(RuntimeError, match="does not say how the compiler laid out one program's memory"):
        tpu.temporary_bytes(tmp_path)
    lines = ["allocation 6: size 4096, output shape is |f32[1024]|, maybe-live-out:", " value: <1 sin @0> (size=4096)"]
    lines += ["allocation 7: size 512, thread-local:", "allocation 8: size 2560, color 6, preallocated-temp:"]
    lines += ["allocation 9: size 9733632, preallocated-temp:", "allocation 10: size 512, constant:", ""]
    (tmp_path / "module_0003.jit_f.after_optimizations-buffer-assignment.txt").write_text("\n".join(lines))
    assert tpu.temporary_bytes(tmp_path) == 9733632


def test_an_answers_temporaries_are_those_of_the_buffer_assignment():
    class Lowered:
        def as_text(self):
            return "a program"

        def compile(self, compiler_options):
            file = Path(compiler_options["xla_dump_to"], "module_0003.jit_f.after_optimizations-buffer-assignment.txt")
            file.write_text("allocation 9: size 42, preallocated-temp:\n")
            return self

        def cost_analysis(self):
            return {"flops": 1.0, "bytes accessed": 1.0}

        def memory_analysis(self):
            sizes = dict.fromkeys(("argument", "generated_code", "output"), 1) | {"temp": 84}
            return SimpleNamespace(**{f"{kind}_size_in_bytes": size for kind, size in sizes.items()})

    assert tpu.ask_compiler(Lowered(), "v5e")["memory"]["temporaries"] == 42


@cache  # building the shapes of a real model takes seconds
def parameters_of(model):
    """How many numbers each part of a pipeline has, counted from its configurations."""
    _, params = tpu.load_shapes(model, "float32")
    return {part: tpu.tree_bytes(tree) // 4 for part, tree in params.items() if part != "scheduler"}


def test_the_parameters_are_as_many_as_published():
    for model, millions in {
        "sd": {"unet": 859.5, "text_encoder": 123.1, "vae": 83.7},
        "sdxl": {"unet": 2567.5, "text_encoder": 123.1, "text_encoder_2": 694.7, "vae": 83.7},
    }.items():
        assert parameters_of(model).keys() == millions.keys()
        for part, expected in millions.items():
            assert parameters_of(model)[part] / 1e6 == pytest.approx(expected, abs=0.06), (model, part)


def test_shapes_are_those_of_the_weights(params):
    _, shapes = tpu.load_shapes("shapes-sd", "float32")
    for part in ("unet", "vae", "text_encoder"):
        pairs = zip(jax.tree.leaves(shapes[part]), jax.tree.leaves(params[part]), strict=True)
        assert all(shape.shape == leaf.shape for shape, leaf in pairs)
        assert jax.tree.structure(shapes[part]) == jax.tree.structure(params[part])


def test_a_folder_is_as_good_as_a_name(checkpoint):
    by_name, by_folder = (tpu.load_shapes(name)[1] for name in ("shapes-sd", checkpoint.source))
    assert by_name == by_folder


def folder_with(folder, **parts):
    """A folder with the configuration of Stable Diffusion 1.4 and another index, as PyTorch's pipelines write it."""
    shutil.copytree(programs.CONFIGURATIONS / "sd", folder)
    index = json.loads((folder / "model_index.json").read_text())
    usual = {
        "_class_name": "StableDiffusionPipeline",
        "feature_extractor": ["transformers", "CLIPFeatureExtractor"],
        "safety_checker": ["stable_diffusion", "StableDiffusionSafetyChecker"],
        "unet": ["diffusers", "UNet2DConditionModel"],
    }
    (folder / "model_index.json").write_text(json.dumps(index | usual | parts))
    return str(folder)


def test_a_folder_made_with_pytorch_is_read_all_the_same(tmp_path):
    assert tpu.load_shapes(folder_with(tmp_path / "sd"))[1] == tpu.load_shapes("sd")[1]


def test_a_scheduler_that_flax_has_not_is_named(tmp_path):
    scheduler = ["diffusers", "EulerAncestralDiscreteScheduler"]
    with pytest.raises(ValueError, match="has a EulerAncestralDiscreteScheduler, and there is no FlaxEulerAncestral"):
        tpu.load_shapes(folder_with(tmp_path / "sd", scheduler=scheduler))


@needs_compiler
def test_a_folder_that_lacks_a_file_is_refused_in_a_sentence(tmp_path, capsys):
    folder = folder_with(tmp_path / "sd")
    (tmp_path / "sd" / "vae" / "config.json").unlink()
    assert main([folder]) == 1
    assert "No such file or directory" in capsys.readouterr().err.splitlines()[-1]


def test_attention_is_laid_out_as_in_the_chapters():
    # Chapter 7 loads XL with split heads, although the checkpoint's configuration says otherwise.
    layouts = {name: tpu.load_shapes(name)[0].unet.config.split_head_dim for name in ("shapes-sd", "shapes-sdxl")}
    assert layouts == {"shapes-sd": False, "shapes-sdxl": True}


def test_a_size_that_the_unet_cannot_halve_is_refused():
    pipeline, params = tpu.load_shapes("shapes-sd")
    program = tpu.Program("shapes-sd", height=72)
    with pytest.raises(ValueError, match=r"shapes-sd cannot draw 72 × 64 pixels: give multiples of \d+\."):
        tpu.lower_parts(program, pipeline, params)


@needs_compiler
def test_weights_are_those_that_a_run_reads_whole():
    pipeline, params = tpu.load_shapes("shapes-sdxl", "float32")
    lowered = tpu.lower_parts(tpu.Program("shapes-sdxl", dtype="float32"), pipeline, params)
    weights = {name: weights for name, (_, _, weights) in lowered.items()}
    assert weights["denoising step"] == tpu.tree_bytes(params["unet"])
    assert weights["VAE decoder"] == tpu.tree_bytes([params["vae"][name] for name in ("decoder", "post_quant_conv")])
    # Of the tokens' embeddings a few rows are read, and XL takes the first encoder's last but one layer.
    first, second = (params[name]["text_model"] for name in ("text_encoder", "text_encoder_2"))
    last = max(first["encoder"]["layers"], key=int)
    unread = [text["embeddings"]["token_embedding"] for text in (first, second)]
    unread += [first["encoder"]["layers"][last], first["final_layer_norm"]]
    encoders = tpu.tree_bytes([params["text_encoder"], params["text_encoder_2"]])
    assert weights["text encoders"] == encoders - tpu.tree_bytes(unread)


@needs_compiler
@pytest.mark.parametrize("chip", tpu.CHIPS)
@pytest.mark.parametrize("chips", [1, 4, 8])
def test_each_chip_can_be_had_in_each_number(chip, chips):
    devices = tpu.tpu_devices(chip, chips)
    assert len(devices) == chips
    assert {device.device_kind for device in devices} <= set(tpu.CHIPS[chip].kinds)


@needs_compiler
@pytest.mark.parametrize(("chip", "sold_as"), [("v4", 32), ("v5e", 16), ("v5p", 96), ("v6e", 32)])
def test_the_compiler_says_how_much_memory_a_chip_has(chip, sold_as):
    assert sold_as - 1.5 < tpu.usable_hbm(chip) / 2**30 <= sold_as


@needs_compiler
def test_the_compilers_refusal_becomes_a_sentence():
    # One picture of 8192 x 8192 pixels; only the decoder of the smallest program is asked, which takes a second.
    pipeline, params = tpu.load_shapes("shapes-sd")
    program = tpu.Program("shapes-sd", height=8192, width=8192)
    lowered, *_ = tpu.lower_parts(program, pipeline, params)["VAE decoder"]
    answer = tpu.ask_compiler(lowered, "v5e")
    assert not answer["fits"]
    assert "Ran out of memory" in answer["message"]


def test_another_refusal_is_not_taken_for_one_of_size():
    class Lowered:
        def as_text(self):
            return "a program"

        def compile(self, compiler_options):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem")

    with pytest.raises(jax.errors.JaxRuntimeError, match="vmem"):
        tpu.ask_compiler(Lowered(), "v5e")


def refuse(*_, **__):
    message = "RESOURCE_EXHAUSTED: Ran out of memory\nand more"
    return {"fits": False, "message": message, "compile_seconds": 1.0, "date": "2026-11-22"}


@needs_compiler
def test_a_program_that_does_not_fit_is_reported_without_parts(monkeypatch):
    monkeypatch.setattr(reports, "ask_compiler", refuse)
    report = tpu.compile_report(tpu.Program("shapes-sd", steps=2))
    assert report["verdict"] == "It does not fit. The compiler: RESOURCE_EXHAUSTED: Ran out of memory"
    assert report["parts"] == []
    validate(report)
    assert "It does not fit" in tpu.text_of(report)
    assert "| no " in tpu.table_of([report]).splitlines()[2]
    assert tpu.table_of([report]).endswith(f", on {report['date']}.")


def accept(unread=2**20):
    memory = dict.fromkeys(("arguments", "temporaries", "program", "output"), 2**30) | {"unread": unread}
    answer = {"fits": True, "flops": 1e12, "bytes_accessed": 1e9, "memory": memory}
    return lambda *_, **__: answer | {"compile_seconds": 1.0, "date": "2026-11-22"}


@needs_compiler
def test_parameters_that_are_not_read_need_room_too(monkeypatch):
    monkeypatch.setattr(reports, "ask_compiler", accept(unread=12 * 2**30))
    report = tpu.compile_report(tpu.Program("shapes-sd", steps=2))
    assert not report["fits"]
    assert report["verdict"] == "It does not fit: its parts take 16.00 GiB on each chip, of 15.75 GiB."
    validate(report)


@needs_compiler
def test_the_command_prints_a_page_or_json(monkeypatch, capsys):
    monkeypatch.setattr(reports, "ask_compiler", accept())
    assert main(["shapes-sd", "--chips", "8", "--steps", "20"]) == 0
    page = capsys.readouterr().out.splitlines()
    assert page[0] == "shapes-sd, 64 × 64 pixels, 20 steps, bfloat16, batch 1 on each of 8 v5e chip(s), by pmap"
    assert page[1] == "It fits: its parts take 4.00 GiB on each chip, of 15.75 GiB."
    assert [line.split()[:3] for line in page if line.startswith("denoising step")] == [["denoising", "step", "20"]]
    assert page[-1].startswith("Compiled in 1 s on 2026-11-22 by libtpu ")
    assert main(["shapes-sd", "--json"]) == 0
    validate(json.loads(capsys.readouterr().out))


@needs_compiler
def test_the_command_looks_for_the_largest_batch(monkeypatch, capsys):
    monkeypatch.setattr(reports, "ask_compiler", refuse)
    assert main(["shapes-sd", "--largest-batch"]) == 0
    assert "The largest batch that fits? None fits: not even one picture at a time." in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["shapes-sd", "--largest-batch", "--batch", "2"])
    assert "--largest-batch looks for the batch itself: leave --batch out" in capsys.readouterr().err


def test_the_command_prints_what_is_recorded(capsys):
    assert main(["--recorded"]) == 0
    assert capsys.readouterr().out == tpu.table_of(tpu.recorded_reports()) + "\n"


@pytest.fixture
def memory_of(monkeypatch):
    """Have a chip of 15.75 GiB, and a compiler to which a program needs ``gib(batch)``; returns the batches asked."""
    asked = []

    def have(gib):
        def answer(program, **_):
            asked.append(program.batch)
            fits = gib(program.batch) <= 15.75
            hbm = {"parameters": 2**29, "temporaries": int((gib(program.batch) - 1) * 2**30), "program": 2**29}
            hbm = hbm | {"output": 0} if fits else None
            return {"fits": fits, "hbm": hbm, "compile_seconds": 1.0, "date": "2026-11-22"}

        monkeypatch.setattr(reports, "memory_report", answer)
        monkeypatch.setattr(reports, "usable_hbm", lambda chip: int(15.75 * 2**30))
        return asked

    return have


@pytest.mark.parametrize(
    ("each", "largest", "predicted", "batches"),
    [(1, 14, 14, [1, 7, 14, 15]), (5, 2, 2, [1, 2, 3]), (9, 1, None, [1, 2]), (20, 0, None, [1])],
)
def test_the_largest_batch_is_predicted_from_two_compilations(memory_of, each, largest, predicted, batches):
    asked = memory_of(lambda batch: 1 + each * batch)
    found = tpu.largest_batch(tpu.Program("sd"))
    assert (found["largest"], found["predicted"], asked) == (largest, predicted, batches)
    assert [entry["fits"] for entry in found["tried"]] == [batch <= largest for batch in sorted(batches)]


@pytest.mark.parametrize("each", [5, 20, 9, 1])
@pytest.mark.parametrize("bend", [0.0, 0.15, -0.15])
def test_the_largest_batch_is_confirmed_at_n_and_n_plus_1(memory_of, each, bend):
    memory_of(lambda batch: 1 + each * batch * (1 + bend * (batch > 2)))  # with a bend, later pictures differ
    found = tpu.largest_batch(tpu.Program("sd"))
    tried = {entry["batch"]: entry["fits"] for entry in found["tried"]}
    assert not tried[found["largest"] + 1]
    assert found["largest"] == 0 or tried[found["largest"]]


def test_a_report_spares_the_first_compilation_unless_versions_differ(memory_of):
    asked = memory_of(lambda batch: 1 + batch)
    report = reports.memory_report(tpu.Program("sd")) | {"versions": compiler.versions()}
    asked.clear()
    found = tpu.largest_batch(tpu.Program("sd"), report=report)
    assert (found["largest"], asked) == (14, [7, 14, 15])
    assert found["tried"][0]["fits"]
    asked.clear()
    assert tpu.largest_batch(tpu.Program("sd"), report=report | {"versions": {}}) == found
    assert asked == [1, 7, 14, 15]


@pytest.mark.parametrize(
    ("guess", "batches"), [(13, [1, 13, 14, 15]), (14, [1, 14, 15]), (20, [1, 20, 15, 5, 10, 12, 13, 14])]
)
def test_the_search_for_the_largest_batch_starts_from_a_guess(memory_of, guess, batches):
    asked = memory_of(lambda batch: 1 + batch)
    assert tpu.largest_batch(tpu.Program("sd"), guess=guess)["largest"] == 14
    assert asked == batches


def test_no_batch_below_a_fitting_guess_is_compiled(memory_of):
    asked = memory_of(lambda batch: 1 + batch / 5 + 20 * (batch > 10))
    assert tpu.largest_batch(tpu.Program("sd"), guess=10)["largest"] == 10
    assert min(asked[1:]) == 10


@pytest.mark.parametrize(
    ("gib", "compilations"),
    [
        pytest.param(lambda batch: 2 + batch * (0.8 if batch < 3 else 0.9), 6, id="somewhat more later"),
        pytest.param(lambda batch: 2 + batch * (1.0 if batch < 3 else 0.9), 8, id="somewhat less later"),
        pytest.param(lambda batch: 2 + 5 * -(-batch // 8), 12, id="full tiles of eight"),
        pytest.param(lambda batch: 2 + 5 * -(-batch // 8) + batch / 5000, 12, id="full tiles, and outputs"),
        pytest.param(lambda batch: 2 + 0.5 * batch - 3 * (batch >= 8), 12, id="the compiler saves from some batch on"),
        pytest.param(lambda batch: 2 + 6 * (batch > 1) + 0.05 * batch, 18, id="much for the second, then little"),
        pytest.param(lambda batch: 2 + 11 * (batch > 3) + 0.02 * batch, 18, id="much for the fourth, then little"),
    ],
)
def test_the_largest_batch_is_found_soon_where_memory_grows_unevenly(memory_of, gib, compilations):
    asked = memory_of(gib)
    found = tpu.largest_batch(tpu.Program("sd"))
    tried = {entry["batch"]: entry["fits"] for entry in found["tried"]}
    assert tried[found["largest"]]
    assert not tried[found["largest"] + 1]
    assert len(asked) <= compilations


@needs_compiler
def test_answers_are_kept_under_program_chip_and_versions(tmp_path, monkeypatch):
    def lower(chip, n):
        sharding = jax.sharding.SingleDeviceSharding(tpu.tpu_devices(chip)[0])
        return jax.jit(lambda x: x @ x).lower(jax.ShapeDtypeStruct((n, n), "float32", sharding=sharding))

    said = []
    for chip, n in (("v5e", 256), ("v4", 256), ("v5e", 512), ("v5e", 256)):
        tpu.ask_compiler(lower(chip, n), chip, label=f"{chip} {n}", cache=tmp_path, say=said.append)
    assert len(list(tmp_path.iterdir())) == 3
    assert said[-1] == f"v5e 256: found in {tmp_path}"
    monkeypatch.setattr(compiler, "versions", lambda: {"libtpu": "another"})
    tpu.ask_compiler(lower("v5e", 256), "v5e", cache=tmp_path)
    assert len(list(tmp_path.iterdir())) == 4


@needs_compiler
def test_an_unknown_chip_or_number_is_refused_in_a_sentence(capsys):
    assert main(["shapes-sd", "--chip", "v9"]) == 1
    assert capsys.readouterr().err == "No chip 'v9' is known here: choose one of v4, v5e, v5p, v6e.\n"
    assert main(["shapes-sd", "--chips", "3"]) == 1
    assert capsys.readouterr().err == "3 chips cannot be asked for: choose 1, 4 or 8.\n"


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"dtype": "int8"}, "choose bfloat16 or float32"),
        ({"parallel": "xmap"}, "choose pmap or jit"),
        ({"batch": 0}, "give at least 1"),
        ({"height": 100}, "give a multiple of 8"),
    ],
)
def test_impossible_programs_are_refused(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        tpu.Program("sd", **settings)


def test_an_unknown_pipeline_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'nothing' is no pipeline: give sd, sdxl, shapes-sd"):
        tpu.load_shapes("nothing")
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "FlaxFluxPipeline"}))
    with pytest.raises(ValueError, match=r"is a FluxPipeline: only Stable Diffusion 1.x and XL have Flax pipelines"):
        tpu.load_shapes(str(tmp_path))


@pytest.mark.parametrize(("system", "machine"), [("Darwin", "arm64"), ("Windows", "AMD64"), ("Linux", "aarch64")])
def test_other_systems_get_one_sentence(monkeypatch, capsys, system, machine):
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert main(["shapes-sd"]) == 1
    said = capsys.readouterr().err
    assert f"and this is {system} on {machine}" in said
    assert said.count("\n") == 1


def test_without_libtpu_the_command_that_installs_it_is_given(monkeypatch, capsys):
    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: None)
    assert main(["shapes-sd"]) == 1
    said = capsys.readouterr().err
    assert "pip install 'jax[tpu]'" in said
    assert said.count("\n") == 1


@needs_compiler
def test_with_an_old_jax_there_is_a_sentence_and_no_crash(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 7, 2))
    with pytest.raises(RuntimeError, match="the TPU compiler crashes: install a newer JAX, or read the recorded"):
        tpu.tpu_devices()


@needs_compiler
def test_libtpu_held_by_another_process_gives_one_sentence():
    code = "import jax; jax.config.update('jax_platforms', 'cpu'); from helpers import tpu; tpu.tpu_devices(); "
    code += "print('held', flush=True); input()"
    # As on a machine with chips, where two processes at a time must not reach for them.
    environment = os.environ | {"ALLOW_MULTIPLE_LIBTPU_LOAD": "0"}
    holder = subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert holder.stdout.readline() == "held\n"
        command = [sys.executable, "-m", "helpers.tpu", "shapes-sd"]
        second = subprocess.run(command, env=environment, capture_output=True, text=True)
    finally:
        holder.communicate("\n")
    assert second.returncode == 1
    assert second.stdout == ""
    assert second.stderr.splitlines()[-1].startswith("Another process holds libtpu: wait until it has ended")
    assert "Traceback" not in second.stderr


def validate(report):
    schema = json.loads((ROOT / "benchmarks" / "report.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(report, schema)


def test_everything_is_recorded():
    assert record_tpu.missing(record_tpu.programs(), record_tpu.FOLDER) == []
    assert len(tpu.recorded_reports()) == len(RECORDED) == len(record_tpu.programs())


@each_report
def test_a_recorded_report_fits_the_schema(file):
    validate(json.loads(file.read_text()))


@each_report
def test_a_recorded_report_is_on_the_program_of_its_name(file):
    program = record_tpu.programs()[file.stem]
    report = json.loads(file.read_text())
    for name in ("pipeline", "chip", "chips", "batch", "dtype", "steps", "parallel"):
        assert report["program"][name] == getattr(program, name)
    sides = {"shapes-sd": 64, "sd": 512, "sdxl": 1024}[program.pipeline]
    heads = program.pipeline == "sdxl" if program.split_head_dim is None else program.split_head_dim
    assert [report["program"][name] for name in ("height", "width", "split_head_dim")] == [sides, sides, heads]


@pytest.mark.parametrize("name", [n for n, program in record_tpu.programs().items() if record_tpu.is_searched(program)])
def test_a_recorded_largest_batch_is_confirmed(name):
    found = json.loads((record_tpu.FOLDER / f"{name}.json").read_text())["largest_batch"]
    tried = {entry["batch"]: entry["fits"] for entry in found["tried"]}
    assert not tried[found["largest"] + 1]
    assert found["largest"] == 0 or tried[found["largest"]]


@each_report
def test_a_recorded_verdict_is_that_of_its_figures(file):
    report = json.loads(file.read_text())
    if report["hbm"]:
        assert f"{sum(report['hbm'].values()) / 2**30:.2f} GiB" in report["verdict"]
    for entry in [report, *(report["largest_batch"] or {"tried": []})["tried"]]:
        assert entry["fits"] == bool(entry["hbm"] and sum(entry["hbm"].values()) <= report["usable_hbm"])


@each_report
def test_recorded_parameters_are_those_of_the_configurations(file):
    report = json.loads(file.read_text())
    model, each = report["program"]["pipeline"], {"bfloat16": 2, "float32": 4}[report["program"]["dtype"]]
    counted = {part: number * each for part, number in parameters_of(model).items()}
    assert report["parameter_bytes"] == counted
    if report["fits"]:  # the compiler adds inputs, and leaves room around small arrays, of which a small model is made
        room = 1.5 if model.startswith("shapes") else 1.05
        assert 1 <= report["hbm"]["parameters"] / sum(counted.values()) < room


@each_report
def test_recorded_operations_add_up_to_the_whole(file):
    report = json.loads(file.read_text())
    if not report["fits"]:
        return
    assert 0.98 < report["whole"]["flops"] / sum(part["flops"] for part in report["parts"]) < 1.02
    for part in report["parts"]:
        assert part["least_seconds"] == pytest.approx(max(tpu.least_seconds(part, report["program"]["chip"])))
    assert report["least_seconds"] == pytest.approx(sum(part["least_seconds"] for part in report["parts"]))


def test_the_bound_lies_below_each_published_time():
    times = tpu.published_times(tpu.recorded_reports())
    assert {system for system, *_ in times} == {"TPU v5e-4", "TPU v4-8"}
    for _, least, measured in times:
        assert 0.1 * measured < least < measured  # a bound far below would be a wrong count, too


def test_the_most_useful_is_recorded_first(tmp_path):
    left = record_tpu.missing(record_tpu.programs(), tmp_path)
    real = [(name, what) for name, what in left if not name.startswith("shapes")]
    reports = [(name, "report") for name in ("sd-bfloat16-v5e", "sdxl-bfloat16-v5e", "sdxl-bfloat16-v4")]
    assert real[:3] == reports
    assert real[-12:] == [(name, "largest batch") for name, _ in real[:12]]


def test_the_recorder_names_what_is_left_to_do(capsys, tmp_path):
    assert record_tpu.main(["--list", "--to", str(tmp_path)]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) == len(record_tpu.programs())
    assert sum("report, largest batch to do" in line for line in listed) == 12
    assert record_tpu.main(["--minutes", "0", "--to", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"Left to do: {len(listed) + 12}. Failed: nothing.\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("options", "guess"), [([], 7), (["--guess", "5"], 5)])
def test_the_recorder_adds_the_largest_batch_to_a_report(monkeypatch, tmp_path, options, guess):
    found = {"largest": 0, "predicted": None, "tried": []}
    monkeypatch.setattr(tpu, "tpu_devices", lambda: None)
    asked = []
    monkeypatch.setattr(tpu, "largest_batch", lambda *_, report, guess, **__: asked.append((report, guess)) or found)
    monkeypatch.setattr(record_tpu, "guess_from_another_chip", lambda *_: 7)
    report = {"of": "v4", "usable_hbm": 32, "largest_batch": None}
    monkeypatch.setattr(tpu, "compile_report", lambda *_, **__: report)
    assert record_tpu.main([*options, "--only", "sdxl-float32-v4", "--to", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "sdxl-float32-v4.json").read_text()) == report | {"largest_batch": found}
    assert asked == [(report, guess)]


def test_a_search_begins_with_more_than_one_picture(capsys):
    with pytest.raises(SystemExit):
        record_tpu.main(["--guess", "1"])
    assert "--guess is 1, and has to be 2 or more" in capsys.readouterr().err


@pytest.mark.parametrize(("usable", "guess"), [(32, 27), (10, 7)])
def test_the_recorder_guesses_from_the_chip_with_the_most_similar_memory(tmp_path, usable, guess):
    wanted = record_tpu.programs()

    def record(chip, usable_there, largest, each):
        needs = [{"parameters": 2, "temporaries": each * batch} for batch in (1, largest)]
        tried = [{"batch": n, "fits": True, "hbm": hbm} for n, hbm in zip((1, largest), needs, strict=True)]
        tried.append({"batch": largest + 1, "fits": False, "hbm": None})
        report = {"usable_hbm": usable_there, "largest_batch": {"largest": largest, "tried": tried}}
        (tmp_path / f"sd-bfloat16-{chip}.json").write_text(json.dumps(report))

    assert record_tpu.guess_from_another_chip(wanted["sd-bfloat16-v4"], usable, tmp_path) is None
    record("v5e", 16, 10, 1)  # 2 for the parameters, and 1 for each picture
    assert record_tpu.guess_from_another_chip(wanted["sd-bfloat16-v4"], usable, tmp_path) == guess
    record("v6e", 1000, 10, 5)
    assert record_tpu.guess_from_another_chip(wanted["sd-bfloat16-v4"], usable, tmp_path) == guess
    record("v6e", 1000, 1, 5)
    (tmp_path / "sd-bfloat16-v5e.json").write_text(json.dumps({"usable_hbm": 16, "largest_batch": None}))
    for name in ("sd-bfloat16-v4", "sd-bfloat16-v5e", "sd-float32-v4"):
        assert record_tpu.guess_from_another_chip(wanted[name], usable, tmp_path) is None


def test_the_recorder_goes_on_after_a_program_that_fails(monkeypatch, capsys, tmp_path):
    def report(program, **_):
        if program.chip == "v4":
            raise jax.errors.JaxRuntimeError("INTERNAL: no such thing")
        return {"of": program.chip, "usable_hbm": 32, "largest_batch": {"largest": 0}}

    monkeypatch.setattr(tpu, "tpu_devices", lambda: None)
    monkeypatch.setattr(tpu, "compile_report", report)
    monkeypatch.setattr(tpu, "largest_batch", lambda *_, **__: {"largest": 0})
    assert record_tpu.main(["--only", "sdxl-bfloat16-v", "--to", str(tmp_path)]) == 1
    assert capsys.readouterr().out == "Left to do: 0. Failed: sdxl-bfloat16-v4.\n"
    assert "sdxl-bfloat16-v6e.json" in {file.name for file in tmp_path.iterdir()}
