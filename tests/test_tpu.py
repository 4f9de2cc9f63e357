"""The TPU compiler, asked without a TPU: about any function, and about Stable Diffusion."""

import dataclasses
import doctest
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import nbformat
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pallas_tpu
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from course import sd, tpu
from course.model import attention
from course.tpu import chips, compiler, make_program, worker
from course.tpu.__main__ import main, parse_shape
from course.tpu.answers import Answer
from course.tpu.hlo import find_collectives
from course.tpu.jaxpr import Product, find_products, kernel_bytes
from course.tpu.pieces import (
    answer_or_recall,
    ask_about,
    build_pipeline,
    take_piece,
    tree_bytes,
)
from course.tpu.programs import CONFIGURATIONS, DECODER, ENCODERS, PARTS, STEP, WHOLE
from tests.makers.files import edit_json

ROOT = Path(__file__).resolve().parents[1]
MIB = 2**20
GIB = 2**30
V5E = tpu.Chip("v5e", 197e12, 820e9, 128 * MIB, int(15.75 * GIB))
# libtpu exists for no other system, which the tests of its absence check everywhere.
needs_compiler = pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"),
    reason="the TPU compiler runs on Linux on x86-64",
)


def shape(*sides, dtype="float32", **options):
    return jax.ShapeDtypeStruct(sides, dtype, **options)


def split_over(chips):
    mesh = Mesh(np.array(tpu.tpu_devices("v5e", chips)), ("chips",))
    return NamedSharding(mesh, PartitionSpec("chips"))


def report_of(memory=None, message=""):
    """A report that no compiler had to be asked for."""
    work = tpu.Work(1e12, 1e9, 2**30) if memory else None
    return tpu.Report(V5E, memory, work, message, 1.0, "2026-11-22", tpu.versions())


ACCEPTED = report_of(tpu.Memory(GIB, GIB, GIB, GIB))
REFUSED = report_of(message="RESOURCE_EXHAUSTED: Ran out of memory\nand more")


@pytest.fixture
def here(monkeypatch):
    """Let the compiler run in this process, which has loaded JAX and libtpu already."""

    def compile_here(command, **_):
        folder = Path(command[-2])  # the last is the number of the process that asks
        (folder / "answer.json").write_text(json.dumps(worker.compile_question(folder)))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(compiler, "subprocess", SimpleNamespace(run=compile_here))


# Any function


@needs_compiler
@pytest.mark.usefixtures("here")
def test_the_page_about_functions_of_ones_own_is_true():
    page = ROOT / "docs" / "ask-the-compiler.md"
    result = doctest.testfile(str(page), module_relative=False)
    assert result.attempted > 10
    assert result.failed == 0


@needs_compiler
@pytest.mark.usefixtures("here")
def test_pmap_changes_no_answer_and_what_is_unread_needs_room():
    def double(x, y, *unread):
        return x @ y

    x = shape(256, 256)
    quarter = shape(4 * 2048, 1024, sharding=split_over(4))
    # Of arrays only the shape counts, wherever they lie.
    ones = jnp.ones((256, 256))
    plain = tpu.ask_compiler(double, ones, x, {"a": shape(2048, 1024), "b": None}, quarter)
    on_eight = jax.pmap(double, devices=tpu.tpu_devices("v5e", 8))
    pmapped = tpu.ask_compiler(on_eight, *[shape(8, 256, 256)] * 2, shape(8, 2048, 1024))
    read = 2 * 256**2 * 4
    for answer, unread in ((plain, 16 * MIB), (pmapped, 8 * MIB)):
        assert answer.work.flops == pytest.approx(2 * 256**3, rel=0.01)
        assert answer.work.least_bytes == 3 * 256**2 * 4
        assert (answer.memory.arguments, answer.memory.output) == (read + unread, 256**2 * 4)


@needs_compiler
def test_the_answer_is_what_compiling_in_this_process_says(monkeypatch):
    """Two chips in an order of their own exchange data, and an argument is not read.

    Without a buffer assignment the temporaries are those of ``memory_analysis``, with a note.
    """
    mesh = Mesh(np.array(tpu.tpu_devices("v5e", 4)[2:0:-1]), ("chips",))
    split = NamedSharding(mesh, PartitionSpec("chips"))
    inputs = (shape(1024, 256, sharding=split), shape(8, 8))
    monkeypatch.setattr(compiler, "read_temporaries", lambda dump: None)
    report = tpu.ask_compiler(lambda x, unread: (x @ x.T).sum(axis=0), *inputs)
    compiled = jax.jit(lambda x, unread: (x @ x.T).sum(axis=0)).lower(*inputs).compile()
    memory = compiled.memory_analysis()
    cost = compiled.cost_analysis()
    unread = 8 * 8 * 4
    assert vars(report.memory) == {
        "arguments": memory.argument_size_in_bytes + unread,
        "temporaries": memory.temp_size_in_bytes,
        "program": memory.generated_code_size_in_bytes,
        "output": memory.output_size_in_bytes,
    }
    assert (report.work.flops, report.work.bytes_accessed) == (
        cost["flops"],
        cost["bytes accessed"],
    )
    assert report.collectives == tuple(find_collectives(compiled))
    assert len(report.collectives) >= 1
    assert "Devices exchange " in str(report)
    assert "the temporaries are by memory_analysis" in report.note
    assert report.note in str(report)


@needs_compiler
def test_what_jax_hands_to_the_compiler_is_what_is_asked():
    """The options of ``jax.jit``, who chooses each sharding, and the devices in their order."""
    mesh = Mesh(np.array(tpu.tpu_devices("v5e", 4)[::-1]), ("chips",))
    split = NamedSharding(mesh, PartitionSpec("chips"))
    flags = {"xla_tpu_scoped_vmem_limit_kib": "65536"}
    function = jax.jit(
        lambda x, y, unread: (x + y, y),
        in_shardings=(split, None, None),
        out_shardings=(None, split),
        compiler_options=flags,
    )
    lowering = compiler.read_lowering(function.lower(*[shape(8, 8)] * 3))
    assert lowering.devices == list(mesh.devices)
    assert lowering.arguments == {0, 1}
    assert (lowering.open_inputs, lowering.open_outputs) == ([False, True], [True, False])
    assert lowering.options == flags


@needs_compiler
@pytest.mark.usefixtures("here")
def test_copies_between_memories_count_several_times_in_the_bytes_accessed():
    """What the compiler counts without its copies is what the two products read and write."""

    def feed_forward(x, up, down):
        return jax.nn.gelu(x @ up) @ down

    x, up, down = (
        shape(*sides, dtype="bfloat16") for sides in ((1024, 1280), (1280, 5120), (5120, 1280))
    )
    report = tpu.ask_compiler(feed_forward, x, up, down)
    assert [str(copy) for copy in report.copies] == [
        "1 × bf16[1280,5120], from HBM to S(1)",
        "1 × bf16[5120,1280], from HBM to S(1)",
    ]
    copied = sum(copy.number * copy.bytes for copy in report.copies)
    assert copied == 2 * (up.size + down.size)
    hidden = 1024 * 5120
    products = 2 * (x.size + up.size + hidden + hidden + down.size + x.size)
    # A copy adds what it reads, both places that its start names, and what its end gives.
    assert report.work.bytes_accessed - 4 * copied == pytest.approx(products, rel=0.001)
    page = str(report)
    assert "The compiler counts 157.3 MB accessed.\nIn that are, several times, 2 copies" in page


def test_a_program_that_takes_more_than_there_is_does_not_fit():
    report = report_of(tpu.Memory(15 * GIB, GIB, 0, GIB // 100))
    assert not report.fits
    assert report.verdict == "It does not fit: it takes 16.01 GiB on each device, of 15.75 GiB."


@needs_compiler
@pytest.mark.usefixtures("here")
def test_a_donated_argument_counts_once_and_temporaries_lie_in_hbm():
    def use(donated, x):
        kept = jax.lax.optimization_barrier  # without it, no array would lie between the two
        return donated + 1, kept(x + 1).sum()

    # The second is too large for any memory on the chip.
    inputs = shape(1024, 1024), shape(2**13, 2**14)
    report = tpu.ask_compiler(jax.jit(use, donate_argnums=0), *inputs)
    assert report.memory.arguments == (4 + 512) * MIB
    assert report.memory.output < MIB
    assert report.memory.temporaries == pytest.approx(512 * MIB, rel=0.01)
    assert report.note == ""


@pytest.mark.parametrize("page", ["", "page 0, "], ids=["libtpu 0.0.42", "libtpu 0.0.50"])
def test_of_a_buffer_assignment_only_the_temporaries_in_hbm_count(tmp_path, page):
    lines = [
        f"allocation 6: size 4096, {page}output shape is |f32[1024]|, maybe-live-out:",
        " value: <1 sin @0> (size=4096)",
        f"allocation 7: size 512, {page}thread-local:",
        f"allocation 8: size 2560, color 6, {page}preallocated-temp:",
        f"allocation 9: size 9733632, {page}preallocated-temp:",
        f"allocation 10: size 512, {page}constant:",
        "",
    ]
    file = tmp_path / "module_0003.jit_f.after_optimizations-buffer-assignment.txt"
    file.write_text("\n".join(lines))
    assert compiler.read_temporaries(tmp_path) == 9733632
    file.write_text("in another form")
    assert compiler.read_temporaries(tmp_path) is None


@needs_compiler
def test_a_question_that_cannot_be_is_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"devices of the kind cpu, and not for those of tpu_dev"):
        tpu.ask_compiler(jax.pmap(lambda x: x + 1), shape(1, 8))
    with pytest.raises(ValueError, match=r"TPU v5 lite, and not for those of tpu_devices\('v6e'"):
        tpu.ask_compiler(lambda x: x + 1, shape(8, sharding=split_over(4)), chip="v6e")

    said = {"refused": "RESOURCE_EXHAUSTED: not asked, hbm", "seconds": 1.0}
    monkeypatch.setattr(compiler, "compile_apart", lambda *_: said)
    with pytest.raises(ValueError, match=r"give jax.ShapeDtypeStruct\(\(\), dtype\) in its place"):
        tpu.ask_compiler(lambda x, n: x * n, shape(8), 2)
    static = jax.jit(lambda x, n: x * n, static_argnums=1)
    assert tpu.ask_compiler(static, shape(8), 2).message == said["refused"]

    # Only a program's size is an answer; any other refusal is an error.
    said["refused"] = "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem"
    with pytest.raises(jax.errors.JaxRuntimeError, match="vmem"):
        tpu.ask_compiler(lambda x: x + 1, shape(8))


# A compiler that gives no answer

CRASH = "import os, signal; os.kill(os.getpid(), signal.{})"
EXIT = "import sys; sys.exit('{}')"
NO_ANSWERS = {
    "crash": (CRASH.format("SIGSEGV"), r"compiler crashed \(SIGSEGV\), and this process goes on"),
    "memory": (CRASH.format("SIGKILL"), "SIGKILL.*most likely because memory ran out: give it a s"),
    "lock": (
        EXIT.format("ABORTED: Internal error when accessing libtpu multi-process lockfile"),
        "Another process holds libtpu: wait until it has ended",
    ),
    "flag": (EXIT.format("no such flag"), "ended with status 1.*Its last words: no such flag"),
    "time": ("import time; time.sleep(60)", r"stopped, because it took more than 0\.5 s: give it"),
}


@needs_compiler
@pytest.mark.parametrize("why", NO_ANSWERS)
def test_a_compiler_that_gives_no_answer_ends_in_a_sentence(monkeypatch, capsys, why):
    code, sentence = NO_ANSWERS[why]
    monkeypatch.setattr(compiler, "WORKER", (sys.executable, "-c", code))
    timeout = ["--timeout", "0.5"] if why == "time" else []
    assert main(["jax.numpy:sin", "--shapes", "f32[8]", *timeout]) == 1
    said = capsys.readouterr().err
    assert re.search(sentence, said)
    assert said.count("\n") == 1


def test_the_compiler_ends_when_nobody_waits_for_its_answer_any_more(monkeypatch):
    parents = iter([7, 7, 1])
    monkeypatch.setattr(worker.os, "getppid", lambda: next(parents))
    monkeypatch.setattr(worker.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(worker.os, "_exit", sys.exit)
    with pytest.raises(SystemExit):
        worker.end_with(7)
    assert not list(parents)


@needs_compiler
def test_libtpu_held_by_another_process_gives_one_sentence(monkeypatch):
    def refuse(*_, **__):
        raise jax.errors.JaxRuntimeError(
            "ABORTED: The TPU is already in use by process with pid 1."
        )

    monkeypatch.setattr(chips.topologies, "get_topology_desc", refuse)
    chips.compile_only_devices.cache_clear()
    try:
        with pytest.raises(RuntimeError, match="Another process holds libtpu") as raised:
            tpu.tpu_devices()
        assert not isinstance(raised.value, jax.errors.JaxRuntimeError)
    finally:
        chips.compile_only_devices.cache_clear()


# Where it cannot be asked


@pytest.fixture
def asked_anew():
    """Whether the compiler can be asked is looked up once; forget it before and after a test."""
    chips.find_chip.cache_clear()
    yield
    chips.find_chip.cache_clear()


def install(monkeypatch, libtpu: str | None, jax_needs: list[str]):
    """Let another libtpu be installed, or none, and jax require something else."""
    version = importlib.metadata.version

    def find_version(name):
        if name != "libtpu":
            return version(name)
        if libtpu is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return libtpu

    monkeypatch.setattr(importlib.metadata, "version", find_version)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: jax_needs)


NEEDS = ["numpy>=2.0", "libtpu==0.0.42.*; extra == 'tpu'"]
LINUX = ("Linux", "x86_64")
NOWHERE = [
    (("Darwin", "arm64"), jax.__version__, "0.0.42", "and this is Darwin on arm64"),
    (("Windows", "AMD64"), jax.__version__, "0.0.42", "and this is Windows on AMD64"),
    (("Linux", "aarch64"), jax.__version__, "0.0.42", "and this is Linux on aarch64"),
    (LINUX, jax.__version__, None, "libtpu, is not installed: run `pip install 'jax[tpu]=="),
    (LINUX, jax.__version__, "0.0.17", f"0.0.17 is too old for JAX {jax.__version__}, which needs"),
    (LINUX, "0.7.2", "0.0.42", "can be asked from JAX 0.9.2 on, and this is 0.7.2: install a new"),
]


@pytest.mark.usefixtures("asked_anew")
@pytest.mark.parametrize(("machine", "jax_version", "libtpu", "sentence"), NOWHERE)
def test_where_it_cannot_be_asked_there_is_one_sentence(
    monkeypatch, capsys, machine, jax_version, libtpu, sentence
):
    monkeypatch.setattr(platform, "system", lambda: machine[0])
    monkeypatch.setattr(platform, "machine", lambda: machine[1])
    monkeypatch.setattr(jax, "__version__", jax_version)
    install(monkeypatch, libtpu, NEEDS)
    assert main(["shapes-sd"]) == 1
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1


@needs_compiler
@pytest.mark.usefixtures("asked_anew")
@pytest.mark.parametrize(
    ("libtpu", "jax_needs"),
    [("0.0.42", NEEDS), ("0.0.42.1", NEEDS), ("0.0.50", NEEDS), ("0.0.17", ["numpy>=2.0"])],
)
def test_a_libtpu_that_fits_is_taken(monkeypatch, libtpu, jax_needs):
    install(monkeypatch, libtpu, jax_needs)
    chips.require_compiler()


def test_the_versions_leave_out_packages_that_are_missing(monkeypatch):
    install(monkeypatch, libtpu=None, jax_needs=[])
    assert tpu.versions("jax", "libtpu") == {"jax": jax.__version__}


@pytest.mark.usefixtures("asked_anew")
def test_chapter_8_runs_where_the_compiler_is_missing(monkeypatch, capsys):
    """It shows recorded answers to all of its questions, those of its solutions among them."""
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr("matplotlib.pyplot.show", lambda: None)
    names = {}
    for cell in nbformat.read(ROOT / "notebooks" / "08_tpu_compiler.ipynb", as_version=4).cells:
        if cell.cell_type == "code" and "setup" not in cell.metadata.get("tags", []):
            exec(cell.source, names)
    said = capsys.readouterr().out
    assert "What follows are recorded answers." in said
    assert "It fits: it takes 0.09 GiB on each device, of 15.75 GiB." in said
    assert "from 253 rows on" in said
    unknown = shape(3, 5)
    with pytest.raises(RuntimeError, match=r"None is recorded on add_one\(float32\[3,5\]\) on v5e"):
        tpu.ask_or_recall(names["add_one"], unknown)
    with pytest.raises(RuntimeError, match=r"None is recorded on shapes-sd, .* batch 7"):
        answer_or_recall(make_program("shapes-sd", batch=7))


def test_a_programs_text_names_no_file_of_the_machine_that_compiled_it():
    instruction = '  ROOT %y = f32[8] negate(%x), metadata={op_name="neg"}'
    tables = 'FileNames\n1 "/made/up/chapter.py"\n\nStackFrames\n1 {parent_frame_id=1}\n\n\n'
    text = f'HloModule it\n\n{tables}ENTRY %main {{\n{instruction}, backend_config={{"a":1}}\n}}\n'
    expected = f"HloModule it\n\nENTRY %main {{\n{instruction}\n}}\n"
    assert compiler.without_notes(text) == expected


@pytest.mark.usefixtures("asked_anew")
def test_chapter_12_shows_recorded_answers_where_the_compiler_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    names = {"jax": jax, "jnp": jnp, "sd": sd, "tokens": 4096}
    names["shape"] = shape(2, 4096, 10, 64, dtype="bfloat16")
    for cell in nbformat.read(ROOT / "notebooks" / "12_faster.ipynb", as_version=4).cells:
        if cell.id in ("12-ask", "12-wide", "12-late", "12-axes"):
            exec(cell.source, names)
    said = capsys.readouterr().out
    assert said.count("1 kernel(s), no scores in memory") == 3  # plain, flash, wide_softmax
    assert said.count("all scores in memory") == 3


# Chips

# Of a chip, as Google documents it at cloud.google.com/tpu/docs: peak in bfloat16, and bandwidth.
DOCUMENTED = {
    "v4": (275e12, 1228e9),
    "v5e": (197e12, 819e9),
    "v5p": (459e12, 2765e9),
    "v6e": (918e12, 1638e9),
    "tpu7x": (2307e12, 7380e9),
}


@needs_compiler
@pytest.mark.parametrize("chip", tpu.CHIPS)
def test_a_chip_can_be_had_in_each_number_and_has_the_documented_figures(chip):
    kind = tpu.CHIPS[chip]
    for number in (1, 4, 8):
        devices = tpu.tpu_devices(chip, number)
        assert len(devices) == (2 * number if chip == "tpu7x" else number)
        assert {device.device_kind for device in devices} <= set(kind.device_kinds)
        assert {device.num_cores for device in devices} == {kind.cores}
        assert {device.process_index for device in devices} == {0}
    found = tpu.find_chip(chip)
    in_chip = len(tpu.tpu_devices(chip))
    figures = (found.peak * in_chip, found.bandwidth * in_chip)
    assert figures == pytest.approx(DOCUMENTED[chip], rel=0.005)
    # A bound must take the more.
    assert all(ours >= theirs for ours, theirs in zip(figures, DOCUMENTED[chip], strict=True))
    assert 64 * MIB <= found.on_chip <= 160 * MIB
    version = pallas_tpu.ChipVersion(chip.removeprefix("tpu"))
    information = pallas_tpu.get_tpu_info_for_chip(version, kind.cores)
    assert kind.mxu == information.mxu_column_size


@needs_compiler
@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("chip", tpu.CHIPS)
def test_the_compiler_confirms_how_much_memory_a_program_may_use(chip):
    refused = tpu.ask_compiler(lambda x: x + 1, shape(2**18, 2**18), chip=chip)
    assert not refused.fits
    # "exceeds available HBM (15.75G)", or "Used 512.00G of 15.75G hbm"
    said = re.search(r"(?:available HBM \(| of )([\d.]+)G", refused.message)
    assert said[1] == f"{tpu.CHIPS[chip].usable_gib}"


# What a trace says


def test_the_products_of_a_function_are_counted_wherever_they_are():
    def some(x, weights):
        x = jax.nn.relu(x @ weights)  # in a function that is jitted
        x, _ = jax.lax.scan(lambda x, _: (x @ weights, None), x, length=3)
        x = jax.lax.fori_loop(0, x[0, 0].astype(int), lambda i, x: x @ weights, x)
        return jax.checkpoint(lambda x: x @ weights)(x)

    found = find_products(some, shape(16, 64), shape(64, 64))
    # A while loop's body counts once.
    assert found == {Product(number=1, rows=16, depth=64, columns=64): 6}


@pytest.mark.parametrize("groups", [1, 4])
def test_a_convolution_is_a_product_for_each_place_of_its_kernel(groups):
    def convolve(x, kernel):
        return jax.lax.conv_general_dilated(
            x,
            kernel,
            window_strides=(2, 2),
            padding="SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )

    x, kernel = shape(2, 16, 16, 8), shape(3, 3, 8 // groups, 12)
    found = find_products(convolve, x, kernel)
    expected = Product(number=9 * groups, rows=2 * 8 * 8, depth=8 // groups, columns=12 // groups)
    assert found == {expected: 1}


def test_of_a_function_for_several_platforms_the_one_for_tpus_is_counted():
    def choose(x):
        return jax.lax.platform_dependent(x, tpu=lambda x: x @ x @ x, default=lambda x: x)

    assert sum(find_products(choose, shape(8, 8)).values()) == 2

    def only_cpu(x):
        return jax.lax.platform_dependent(x, cpu=lambda x: x @ x)

    with pytest.raises(ValueError, match=r"has no branch for TPUs .*: give it tpu= or default="):
        find_products(only_cpu, shape(8, 8))


def test_a_products_sizes_are_filled_up_to_the_tile():
    product = Product(number=3, rows=77, depth=64, columns=320)
    assert product.padded_flops(128) == 2 * 3 * 80 * 128 * 384
    assert product.padded_flops(128, rows=128) == 2 * 3 * 128 * 128 * 384
    assert product.padded_flops(256) == 2 * 3 * 80 * 256 * 512
    full = Product(number=1, rows=8, depth=256, columns=512)
    assert full.padded_flops(128) == full.flops


def test_a_flash_kernel_fetches_keys_and_values_for_each_block_of_queries():
    """It declares that it reads each array once: 42 MB, of which a quarter is the result."""
    x = shape(2, 4096, 10, 64, dtype="bfloat16")
    array = 2 * 4096 * 10 * 64 * 2
    blocks = 4096 // 512
    by_hand = array * (1 + blocks + blocks + 1)  # queries, keys, values, the result
    assert by_hand == 188_743_680
    assert kernel_bytes(attention.flash_kernel, x, x, x) == by_hand
    # What chooses the kernel on TPUs only does the same.
    assert kernel_bytes(attention.flash, x, x, x) == by_hand
    assert kernel_bytes(attention.plain, x, x, x) == 0


def test_a_block_that_stays_is_fetched_once():
    def kernel(weights_ref, x_ref, y_ref):
        y_ref[...] = x_ref[...] @ weights_ref[...]

    product = pl.pallas_call(
        kernel,
        shape(1024, 128),
        grid=(4, 2),  # the second axis does the same again, with the same blocks
        in_specs=[
            pl.BlockSpec((128, 128), lambda i, j: (0, 0)),
            pl.BlockSpec((256, 128), lambda i, j: (i, 0)),
        ],
        out_specs=pl.BlockSpec((256, 128), lambda i, j: (i, 0)),
    )
    once = 4 * 128 * (128 + 1024 + 1024)
    assert kernel_bytes(product, shape(128, 128), shape(1024, 128)) == once

    def twice(weights, x):
        return jax.lax.scan(lambda x, _: (product(weights, x), None), x, length=2)

    assert kernel_bytes(twice, shape(128, 128), shape(1024, 128)) == 2 * once


# Programs


def test_a_program_leaves_nothing_to_a_default():
    xl = make_program("sdxl")
    assert (xl.height, xl.width, xl.split_head_dim) == (1024, 1024, True)
    # Chapter 7 loads XL with split heads, although the checkpoint's configuration says otherwise.
    assert make_program("sd").split_head_dim is False
    plain = make_program("sd", attention="plain", height=768)
    assert (plain.height, plain.width, plain.split_head_dim) == (768, 512, None)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"dtype": "int8"}, "choose bfloat16 or float32"),
        ({"batch": 0}, "batch is 0: give at least 1"),
        ({"batch": 10**9}, "batch is 1000000000: give at most 65536"),
        ({"height": 1_600_000_000}, "are too many to ask about: give sides of at most 16384"),
        ({"steps": 0}, "steps is 0: give at least 1"),
        ({"steps": 10**20}, "steps is 100000000000000000000: give at most 10000"),
        ({"attention": "fast"}, "There is no attention 'fast': choose one of automatic, "),
        ({"height": 72}, r"shapes-sd cannot draw 72 × 64 pixels: give multiples of \d+\."),
        ({"width": 0}, "cannot draw 64 × 0 pixels"),
        ({"attention": "plain", "chips": 4}, "chips and split_head_dim are for pipelines"),
        ({"decode_batch": 1}, "decode_batch is for course.sd: give an attention, too"),
    ],
)
def test_impossible_programs_are_refused(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        make_program("shapes-sd", **settings)


def test_a_step_runs_as_often_as_there_are_steps():
    small = tpu.Work(flops=197e9, bytes_accessed=82e6, least_bytes=41e6)
    part = dataclasses.replace(ACCEPTED, work=small)
    answer = Answer(make_program("shapes-sd", steps=20), dict.fromkeys((WHOLE, *PARTS), part))
    assert answer.flops == 22 * small.flops
    assert answer.times.operations == pytest.approx(22e-3)
    # What fits into the memory on the chip is read once for all steps.
    assert answer.times.transfers == pytest.approx(3 * 41e6 / 820e9)
    without = answer.times_on(dataclasses.replace(V5E, on_chip=0))
    assert without.transfers == pytest.approx(22 * 41e6 / 820e9)
    del answer.pieces[DECODER]
    assert answer.times is None


# Pipelines


@pytest.fixture(scope="module")
def tiny_xl(tmp_path_factory):
    """A folder with the configuration of an XL pipeline that compiles in seconds."""
    folder = tmp_path_factory.mktemp("tiny") / "sdxl"
    shutil.copytree(CONFIGURATIONS / "sdxl", folder)
    text = {
        "hidden_size": 32,
        "intermediate_size": 37,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "projection_dim": 32,
        "vocab_size": 1000,
    }
    one_level = {"block_out_channels": [32], "layers_per_block": 1}
    vae = one_level | {
        "down_block_types": ["DownEncoderBlock2D"],
        "up_block_types": ["UpDecoderBlock2D"],
    }
    unet = one_level | {
        "down_block_types": ["CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D"],
        "attention_head_dim": [4],
        "cross_attention_dim": 64,
        "projection_class_embeddings_input_dim": 32 + 6 * 256,
        "sample_size": 8,
        "transformer_layers_per_block": [1],
    }
    changes = {"text_encoder": text, "text_encoder_2": text, "unet": unet, "vae": vae}
    for part, options in changes.items():
        edit_json(folder / part / "config.json", lambda found, options=options: found | options)
    return str(folder)


# Chapter 8 finds the same for shapes-sd.
@needs_compiler
@pytest.mark.usefixtures("here")
def test_the_parts_of_a_pipeline_on_eight_chips_add_up_to_the_whole(tiny_xl):
    answer = ask_about(make_program(tiny_xl, chips=8, steps=3))
    assert answer.whole.fits
    assert list(answer.parts) == [ENCODERS, STEP, DECODER]
    # The loop's body counts once, so the parts add up once each.
    flops = sum(part.work.flops for part in answer.parts.values())
    assert flops == pytest.approx(answer.whole.work.flops, rel=0.02)
    # Arguments are the parameters, also the VAE's encoder, which is not read.
    assert answer.whole.memory.arguments >= answer.parameters


@needs_compiler
@pytest.mark.parametrize("model", ["shapes-sd", "shapes-sdxl"])
def test_weights_are_those_that_a_run_reads_whole(model):
    program = make_program(model, steps=3)
    for name in PARTS:
        piece = take_piece(program, name)
        jaxpr = jax.make_jaxpr(piece.function)(*piece.arguments).jaxpr
        _, is_read = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
        weights = jax.tree.leaves_with_path(piece.arguments[0])
        read_whole = []
        for (path, leaf), read in zip(weights, is_read, strict=False):
            # Of the tokens' embeddings a few rows are read.
            if read and "token_embedding" not in jax.tree_util.keystr(path):
                read_whole.append(leaf)
        assert piece.least_bytes == tree_bytes(read_whole), name


def test_shapes_are_those_of_the_weights(params, checkpoint):
    _, shapes = build_pipeline(make_program("shapes-sd", dtype="float32"))
    for part in ("unet", "vae", "text_encoder"):
        found = jax.tree.map(lambda leaf: leaf.shape, shapes[part])
        assert found == jax.tree.map(jnp.shape, params[part])
    of_folder = make_program(checkpoint.source, dtype="float32")
    assert build_pipeline(of_folder)[1] == shapes


def change_index(**changes):
    return lambda folder: edit_json(folder / "model_index.json", lambda found: found | changes)


OF_PYTORCH = change_index(
    _class_name="StableDiffusionXLPipeline",
    feature_extractor=["transformers", "CLIPFeatureExtractor"],
    unet=["diffusers", "UNet2DConditionModel"],
)
BAD_FOLDERS = {
    "no index": (
        lambda folder: (folder / "model_index.json").unlink(),
        "model_index.json is missing: give a whole folder in diffusers' format",
    ),
    "another pipeline": (
        change_index(_class_name="FlaxFluxPipeline"),
        "is made for FlaxFluxPipeline, and this course has models for StableDiffusionPipeline, ",
    ),
    "a scheduler that Flax has not": (
        change_index(scheduler=["diffusers", "EulerAncestralDiscreteScheduler"]),
        "has a EulerAncestralDiscreteScheduler, and there is no FlaxEulerAncestral",
    ),
    "no configuration": (
        lambda folder: (folder / "vae" / "config.json").unlink(),
        "config.json",
    ),
    "parts of different models": (
        lambda folder: edit_json(
            folder / "unet" / "config.json", lambda found: found | {"cross_attention_dim": 1280}
        ),
        "has a part with cross_attention_dim = 1280, and the other parts have 64: ",
    ),
    "half a configuration": (
        lambda folder: (folder / "unet" / "config.json").write_text('{"sample_size": 8, '),
        "unet/config.json is damaged, or no JSON: ",
    ),
}


def test_a_folder_made_with_pytorch_is_read_all_the_same(tiny_xl, tmp_path):
    copy = shutil.copytree(tiny_xl, tmp_path / "copy")
    OF_PYTORCH(copy)
    shapes, expected = (build_pipeline(make_program(str(each)))[1] for each in (copy, tiny_xl))
    assert shapes == expected


@needs_compiler
@pytest.mark.parametrize("how", BAD_FOLDERS)
def test_a_bad_folder_is_refused_in_a_sentence(tiny_xl, tmp_path, capsys, how):
    spoil, sentence = BAD_FOLDERS[how]
    copy = shutil.copytree(tiny_xl, tmp_path / "copy")
    spoil(copy)
    assert main([str(copy)]) == 1
    assert sentence in capsys.readouterr().err.splitlines()[-1]


# The model of course.sd


def test_the_pieces_of_a_program_fit_together():
    program = make_program("shapes-sd", attention="plain")
    results = {}
    for name in (WHOLE, *PARTS):
        piece = take_piece(program, name)
        results[name] = jax.eval_shape(piece.function, *piece.arguments)
    assert results[WHOLE].shape == (1, 64, 64, 3)
    assert jax.tree.leaves(results[STEP])[0].shape == (1, 8, 8, 4)
    assert results[DECODER].shape == (1, 64, 64, 3)


# The command


@needs_compiler
def test_the_command_takes_a_function_from_the_folder_it_is_started_in(tmp_path):
    (tmp_path / "mine.py").write_text("def add(x, y):\n    return x + y\n")
    arguments = ["mine:add", "--shapes", "f32[1024,1024]", "float32[1024,1024]", "--json"]
    result = subprocess.run(
        [sys.executable, "-m", "course.tpu", *arguments],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["memory"]["arguments"] == 8 * MIB
    assert report["work"]["flops"] == 1024**2
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


BAD_QUESTIONS = [
    ("shapes-sd --chip v9", "No chip 'v9' is known here: choose one of v4, v5e, v5p, v6e, tpu7x."),
    ("shapes-sd --chips 3", "3 chips cannot be asked for: choose 1, 4 or 8."),
    ("nothing", "There is no model 'nothing': give sd, sdxl, flux2, shapes-"),
    ("jax.numpy:sinn --shapes f32[8]", "'jax.numpy:sinn' cannot be imported (module 'jax.numpy' h"),
    ("no_such:f --shapes f32[8]", "'no_such:f' cannot be imported (No module named 'no_such'): gi"),
    ("..:f --shapes f32[8]", "'..:f' cannot be imported (the 'package' argument is required"),
    ("os:environ --shapes f32[8]", "'os:environ' is no function: give module:function."),
    ("jax.numpy:sin --shapes f32(8)", "'f32(8)' is no shape: write it as bf16[8,128], or as int32"),
    ("jax.numpy:sin --shapes f99[8]", "'f99[8]' is no shape"),
    (
        "jax.numpy:matmul --shapes f32[8] f32[9]",
        "jax.numpy:matmul does not take f32[8] f32[9]: dot_gen",
    ),
]


@needs_compiler
@pytest.mark.parametrize(("arguments", "sentence"), BAD_QUESTIONS)
def test_what_cannot_be_asked_gets_one_sentence(arguments, sentence, capsys):
    assert main(arguments.split()) == 1
    said = capsys.readouterr().err
    assert said.startswith(sentence)
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    ["jax.numpy:sin", "sd --shapes f32[8]", "jax.numpy:sin --shapes f32[8] --steps 2"],
)
def test_functions_take_shapes_and_programs_sizes(arguments, capsys):
    with pytest.raises(SystemExit):
        main(arguments.split())
    assert "a function needs --shapes, and a model's program" in capsys.readouterr().err


@needs_compiler
@pytest.mark.parametrize("attention", [[], ["--attention", "plain"]], ids=["pipeline", "model"])
def test_the_command_prints_a_page_about_a_program(monkeypatch, capsys, attention):
    monkeypatch.setattr("course.tpu.pieces.ask_compiler", lambda *_, **__: ACCEPTED)
    assert main(["shapes-sd", "--steps", "20", *attention]) == 0
    page = capsys.readouterr().out.splitlines()
    assert page[0].startswith("shapes-sd, 64 × 64 pixels, 20 steps, bfloat16, ")
    assert page[0].endswith("batch 1 on each device of 1 v5e chip(s)")
    assert ("attention plain" in page[0]) == bool(attention)
    assert page[1] == "It fits: it takes 4.00 GiB on each device, of 15.75 GiB."
    (step,) = (line for line in page if line.startswith(STEP))
    assert step.split()[:4] == ["denoising", "step", "20", "1,000"]
    (times,) = (line for line in page if line.startswith("A call: "))
    assert times.startswith("A call: At least 0.112 s, by its FLOPs; its bytes take ")
    assert page[-1].startswith("Compiled in 1 s for v5e on 2026-11-22 by libtpu ")


@needs_compiler
def test_a_program_that_does_not_fit_is_reported_without_parts(monkeypatch, capsys):
    monkeypatch.setattr("course.tpu.pieces.ask_compiler", lambda *_, **__: REFUSED)
    assert main(["shapes-sd"]) == 0
    page = capsys.readouterr().out.splitlines()
    assert page[1] == "It does not fit. The compiler: RESOURCE_EXHAUSTED: Ran out of memory"
    assert not any(line.startswith(PARTS) for line in page)
