"""What a pipeline needs on a TPU, asked of the TPU's own compiler, without a TPU: ``python -m helpers.tpu sd``.

The compiler, libtpu, runs on any Linux machine with an x86-64 processor. Programs are lowered from shapes alone, which
follow from a pipeline's configuration files, so no weights are needed either.
"""

import argparse
import dataclasses
import datetime
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import transformers
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from helpers.checkpoints import bundled_checkpoint, bundled_names
from helpers.devices import has_tpu_chips

GIB = 2**30
CACHE_VARIABLE = "TUTORIAL_TPU_CACHE"
CONFIGURATIONS = Path(__file__).with_name("configurations")
# Installed from a wheel, the recorded reports lie inside the package; in a clone of the repository, beside it.
_RECORDED = (Path(__file__).with_name("recorded"), Path(__file__).parents[1] / "benchmarks" / "tpu")
_PACKAGES = ("jax", "jaxlib", "libtpu", "flax", "diffusers", "transformers")


@dataclass(frozen=True)
class Chip:
    """A kind of TPU chip: what it can do at most, and how to ask the compiler for some.

    Attributes
    ----------
    kind : str
        JAX's ``device_kind``.
    flops, bandwidth : float
        Most operations in bfloat16 in a second, and most bytes from HBM in a second.
    on_chip : int
        Bytes of memory on the chip itself (VMEM, and CMEM on v4), where weights can stay between two steps.
    hbm : int
        Bytes of HBM that the compiler lets a program use; a test asks it.
    topologies : dict
        For each number of chips the arguments of ``get_topology_desc``.
    """

    kind: str
    flops: float
    bandwidth: float
    on_chip: int
    hbm: int
    topologies: dict[int, dict]


def _topologies(one: str, four: str, eight: str, **options) -> dict[int, dict]:
    # A machine has several chips, so a topology of one has to say that its machine is to have one.
    single = {"topology_name": one, "chips_per_host_bounds": (1, 1, 1)}
    return {1: single | options, 4: {"topology_name": four} | options, 8: {"topology_name": eight} | options}


# Peaks and bandwidths are Google's (cloud.google.com/tpu/docs/v4, v5e, v5p, v6e), which for v4 rounds 1228 GB/s to
# 1200; JAX has nearly the same, and the memory on the chip, in jax/_src/pallas/mosaic/tpu_info.py. On v4 and v5p both
# cores of a chip act as one ("megacore"), as they do on a real machine.
CHIPS = {
    "v4": Chip(
        "TPU v4",
        275e12,
        1228e9,
        2 * 16 * 2**20 + 134_000_000,
        int(30.75 * GIB),
        _topologies("v4:1x1x1", "v4:2x2x1", "v4:2x2x2", chip_config_name="megacore"),
    ),
    "v5e": Chip(
        "TPU v5 lite", 197e12, 819e9, 128 * 2**20, int(15.75 * GIB), _topologies("v5e:1x1", "v5e:2x2", "v5e:2x4")
    ),
    "v5p": Chip(
        "TPU v5",
        459e12,
        2765e9,
        2 * 64 * 2**20,
        int(95.74 * GIB),
        _topologies("v5p:1x1x1", "v5p:2x2x1", "v5p:2x2x2", chip_config_name="megacore"),
    ),
    "v6e": Chip(
        "TPU v6 lite", 918e12, 1638e9, 128 * 2**20, int(31.25 * GIB), _topologies("v6e:1x1", "v6e:2x2", "v6e:2x4")
    ),
}


@dataclass(frozen=True)
class Program:
    """A program to compile: a pipeline's ``_generate`` with everything that its shapes depend on.

    Attributes
    ----------
    pipeline : str
        ``sd`` (Stable Diffusion 1.4), ``sdxl`` (Stable Diffusion XL base 1.0), a bundled checkpoint, or the path of a
        folder in diffusers' format, of which only the configuration files are read.
    chip, chips : str, int
        A key of ``CHIPS``, and how many of them: 1, 4 or 8.
    batch : int
        Pictures that each chip draws in a call.
    height, width : int, optional
        Of a picture, in pixels; by default what the UNet was trained for.
    steps : int
    dtype : {"bfloat16", "float32"}
        Of the parameters (but the scheduler's, which stay in float32) and of the computation. The text encoders
        compute in float32 either way, as they do in the chapters.
    parallel : {"pmap", "jit"}
        ``jax.pmap`` as in chapter 5, or ``jax.jit`` with shardings.
    split_head_dim : bool, optional
        How the UNet's attention lays out its heads; by default as the guides load the pipeline, which is True for
        ``sdxl`` and what the configuration says elsewhere.
    """

    pipeline: str
    chip: str = "v5e"
    chips: int = 1
    batch: int = 1
    height: int | None = None
    width: int | None = None
    steps: int = 50
    dtype: str = "bfloat16"
    parallel: str = "pmap"
    split_head_dim: bool | None = None

    def __post_init__(self):
        if self.chip not in CHIPS:
            raise ValueError(f"No chip {self.chip!r} is known here: choose one of {', '.join(CHIPS)}.")
        if self.chips not in CHIPS[self.chip].topologies:
            raise ValueError(f"{self.chips} chips cannot be asked for: choose 1, 4 or 8.")
        if self.dtype not in ("bfloat16", "float32"):
            raise ValueError(f"The dtype is {self.dtype!r}: choose bfloat16 or float32.")
        if self.parallel not in ("pmap", "jit"):
            raise ValueError(f"The program is {self.parallel!r}: choose pmap or jit.")
        for name in ("batch", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: give at least 1.")
        for name in ("height", "width"):
            if getattr(self, name) is not None and (getattr(self, name) < 8 or getattr(self, name) % 8):
                raise ValueError(f"The {name} is {getattr(self, name)}: give a multiple of 8.")


def require_compiler() -> None:
    """Stop, in one sentence, where the TPU compiler cannot run.

    Raises
    ------
    RuntimeError
        On another system than Linux on x86-64, and where libtpu is not installed.
    """
    system, machine = platform.system(), platform.machine()
    if (system, machine) != ("Linux", "x86_64"):
        raise RuntimeError(
            f"The TPU compiler, libtpu, exists for Linux on x86-64 only, and this is {system} on {machine}: use such a "
            "machine (Colab's CPU runtime will do), or read the recorded report (python -m helpers.tpu --recorded)."
        )
    if importlib.util.find_spec("libtpu") is None:
        raise RuntimeError(
            "The TPU compiler, libtpu, is not installed: run `pip install 'jax[tpu]'`, which brings the one for the "
            "installed JAX, or read the recorded report (python -m helpers.tpu --recorded)."
        )


def tpu_devices(chip: str = "v5e", chips: int = 1) -> list:
    """Devices to compile for, and for nothing else: they can run no program and hold no array.

    Builds on ``jax.experimental.topologies.get_topology_desc``.

    Raises
    ------
    ValueError
        If the chip is unknown, or cannot be had in this number.
    RuntimeError
        If the compiler is not there, or another process holds it; one sentence says what to do.
    """
    Program("", chip, chips)
    require_compiler()
    if not has_tpu_chips():
        # Nothing to protect: without chips, several processes may compile at once. The rest answers what libtpu would
        # otherwise ask the network about, and complain about.
        quiet = {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-1", "TPU_SKIP_MDS_QUERY": "1"}
        quiet |= {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_MIN_LOG_LEVEL": "3", "TPU_STDERR_LOG_LEVEL": "3"}
        for variable, value in quiet.items():
            os.environ.setdefault(variable, value)
    try:
        return list(topologies.get_topology_desc(platform="tpu", **CHIPS[chip].topologies[chips]).devices)
    except jax.errors.JaxRuntimeError as error:
        if "lockfile" not in str(error) and "already in use" not in str(error):
            raise
        raise RuntimeError(
            "Another process holds libtpu: wait until it has ended, or, since compiling touches no chip, set "
            "ALLOW_MULTIPLE_LIBTPU_LOAD=1 and start again."
        ) from None


def _folder(name: str) -> Path:
    """Where a pipeline's configuration files are."""
    if (CONFIGURATIONS / name / "model_index.json").exists():
        return CONFIGURATIONS / name
    if name in bundled_names():
        return Path(bundled_checkpoint(name).source)
    if not (Path(name) / "model_index.json").exists():
        known = ", ".join(["sd", "sdxl", *bundled_names()])
        raise ValueError(f"{name!r} is no pipeline: give {known}, or a folder with a model_index.json.")
    return Path(name)


def load_shapes(name: str, dtype: str = "bfloat16", split_head_dim: bool | None = None) -> tuple:
    """Build a pipeline from its configuration files, without weights and without a vocabulary.

    Parameters
    ----------
    name, dtype, split_head_dim
        As in ``Program``.

    Returns
    -------
    pipeline : FlaxStableDiffusionPipeline or FlaxStableDiffusionXLPipeline
    params : dict
        A tree of ``jax.ShapeDtypeStruct`` in the place of parameters.

    Examples
    --------
    >>> pipeline, params = load_shapes("shapes-sd")
    >>> params["unet"]["conv_in"]["kernel"]
    ShapeDtypeStruct(shape=(3, 3, 4, 96), dtype=bfloat16)
    """
    folder = _folder(name)
    index = json.loads((folder / "model_index.json").read_text())
    parts, params = {}, {}
    for part, entry in index.items():
        if not isinstance(entry, list) or entry[0] not in ("diffusers", "transformers") or part.startswith("tokenizer"):
            continue
        library, kind = {"diffusers": diffusers, "transformers": transformers}[entry[0]], entry[1]
        cls = getattr(library, kind if kind.startswith("Flax") else f"Flax{kind}")
        if part == "scheduler":
            parts[part] = cls.from_config(json.loads((folder / part / "scheduler_config.json").read_text()))
            params[part] = jax.eval_shape(parts[part].create_state)
            continue
        config = json.loads((folder / part / "config.json").read_text())
        if entry[0] == "transformers":
            # from_pretrained(dtype=…) never reaches these, so they compute in float32.
            parts[part] = cls(cls.config_class.from_dict(config), _do_init=False)
            shapes = parts[part].params_shape_tree
        else:
            layout = (split_head_dim if split_head_dim is not None else True) if name == "sdxl" else split_head_dim
            if part == "unet" and layout is not None:
                config["split_head_dim"] = layout
            parts[part] = cls.from_config(config, dtype=jnp.dtype(dtype))
            shapes = jax.eval_shape(parts[part].init_weights, jax.random.key(0))
        params[part] = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, jnp.dtype(dtype)), shapes)
    cls_name = index["_class_name"].removeprefix("Flax")
    if cls_name not in ("StableDiffusionPipeline", "StableDiffusionXLPipeline"):
        raise ValueError(f"{name!r} is a {cls_name}: only Stable Diffusion 1.x and XL have Flax pipelines here.")
    if cls_name.endswith("XLPipeline"):
        parts |= {"tokenizer": None, "tokenizer_2": None}
    else:
        parts |= {"tokenizer": None, "safety_checker": None, "feature_extractor": None}
    pipeline = getattr(diffusers, f"Flax{cls_name}")(**parts)
    # _generate tokenizes the empty prompt. Which numbers that gives does not change the program's size or work.
    pipeline.tokenizer = lambda texts, max_length, **_: SimpleNamespace(
        input_ids=np.zeros((len(texts), max_length), np.int32)
    )
    return pipeline, params


def _is_xl(pipeline) -> bool:
    return hasattr(pipeline, "text_encoder_2")


def picture_size(program: Program, pipeline) -> tuple[int, int]:
    """Height and width of a program's pictures, in pixels."""
    usual = pipeline.unet.config.sample_size * pipeline.vae_scale_factor
    return program.height or usual, program.width or usual


def _token_ids(pipeline, batch: int) -> jax.ShapeDtypeStruct:
    length = pipeline.text_encoder.config.max_position_embeddings
    return jax.ShapeDtypeStruct((batch, 2, length) if _is_xl(pipeline) else (batch, length), jnp.int32)


def lower_program(program: Program, pipeline, params) -> jax.stages.Lowered:
    """Lower the pipeline's ``_generate`` for compile-only devices, as chapters 5 and 7 lower it for real ones."""
    devices = tpu_devices(program.chip, program.chips)
    ids = _token_ids(pipeline, program.batch * (program.chips if program.parallel == "jit" else 1))
    key = jax.eval_shape(lambda: jax.random.key(0))
    guidance = jax.ShapeDtypeStruct((1,), jnp.float32)
    static, extra = (3, 4, 5), ()
    if _is_xl(pipeline):
        static, extra = (3, 4, 5, 9), (None, ids, False)  # no latents, negative prompts, pictures and not latents
    if program.parallel == "pmap":
        generate = jax.pmap(pipeline._generate, static_broadcasted_argnums=static, devices=devices)

        def place(tree, split):  # a leading axis with an entry for each device
            return jax.tree.map(lambda s: jax.ShapeDtypeStruct((program.chips, *s.shape), s.dtype), tree)

    else:
        mesh = Mesh(np.array(devices), ("chips",))
        along, everywhere = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("chips",), ()))
        generate = jax.jit(pipeline._generate, static_argnums=static, out_shardings=along)

        def place(tree, split):
            sharding = along if split else everywhere
            return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), tree)

    if extra:
        extra = (None, place(extra[1], True), False)
    sizes = picture_size(program, pipeline)
    inputs = (place(ids, True), place(params, False), place(key, False))
    return generate.lower(*inputs, program.steps, *sizes, place(guidance, False), *extra)


def lower_parts(program: Program, pipeline, params) -> dict[str, tuple[jax.stages.Lowered, int, int]]:
    """Lower the parts of ``_generate`` by themselves, for one chip, since the compiler counts a loop's body once.

    Returns
    -------
    dict
        For each part the lowered program, how often it runs in a call, and the bytes of its weights.
    """
    sharding = SingleDeviceSharding(tpu_devices(program.chip)[0])
    xl, batch = _is_xl(pipeline), program.batch
    unet, vae, scheduler = pipeline.unet, pipeline.vae, pipeline.scheduler

    def encode(params, ids, negative_ids):
        # As _generate does: the prompts, and the negative ones, each by itself.
        if xl:
            return [pipeline.get_embeddings(i, params) for i in (ids, negative_ids)]
        return [pipeline.text_encoder(i, params=params["text_encoder"])[0] for i in (ids, negative_ids)]

    def denoise(unet_params, latents, state, guidance, k, context, added):
        twice = jnp.concatenate([latents] * 2)
        t = jnp.array(state.timesteps, dtype=jnp.int32)[k]
        twice = scheduler.scale_model_input(state, twice, t)
        condition = {"added_cond_kwargs": added} if xl else {}
        times = jnp.broadcast_to(t, twice.shape[0])
        noise = unet.apply({"params": unet_params}, twice, times, encoder_hidden_states=context, **condition).sample
        without, with_prompt = jnp.split(noise, 2, axis=0)
        return scheduler.step(state, without + guidance * (with_prompt - without), t, latents).to_tuple()

    def decode(vae_params, latents):
        latents = 1 / vae.config.scaling_factor * latents
        image = vae.apply({"params": vae_params}, latents, method=vae.decode).sample
        return (image / 2 + 0.5).clip(0, 1).transpose(0, 2, 3, 1)

    def array(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype)

    height, width = picture_size(program, pipeline)
    scale, length = pipeline.vae_scale_factor, pipeline.text_encoder.config.max_position_embeddings
    latents = array(batch, unet.config.in_channels, height // scale, width // scale)
    state = jax.eval_shape(
        lambda s: scheduler.set_timesteps(s, num_inference_steps=program.steps, shape=latents.shape),
        params["scheduler"],
    )
    context = array(2 * batch, length, unet.config.cross_attention_dim)
    added = None
    if xl:
        pooled = pipeline.text_encoder_2.config.projection_dim
        added = {"text_embeds": array(2 * batch, pooled), "time_ids": array(2 * batch, 6)}
    ids = _token_ids(pipeline, batch)
    encoders = {name: tree for name, tree in params.items() if name.startswith("text_encoder")}
    decoder = {name: params["vae"][name] for name in ("decoder", "post_quant_conv")}
    index = array(dtype=jnp.int32)
    parts = {
        "text encoders": (encode, (encoders, ids, ids), 1),
        "denoising step": (denoise, (params["unet"], latents, state, array(1), index, context, added), program.steps),
        "VAE decoder": (decode, (decoder, latents), 1),
    }
    lowered = {}
    for name, (function, arguments, runs) in parts.items():
        placed = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), arguments)
        lowered[name] = (jax.jit(function).lower(*placed), runs, tree_bytes(arguments[0]))
    return lowered


def tree_bytes(tree) -> int:
    """Bytes of all arrays, or shapes, of a tree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def versions() -> dict[str, str | None]:
    """What decides what the compiler answers: the versions of the packages that make and compile the program."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def default_cache() -> Path:
    """The folder of answers: ``TUTORIAL_TPU_CACHE``, or one under the user's cache folder."""
    usual = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "stable-diffusion-jax-course" / "tpu"
    return Path(os.environ.get(CACHE_VARIABLE) or usual)


@contextmanager
def _heartbeat(say: Callable[[str], None], every: float = 60.0):
    """Say every minute that the compiler is still at work."""
    done, start = threading.Event(), time.monotonic()

    def beat():
        while not done.wait(every):
            say(f"  … {time.monotonic() - start:.0f} s")

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def ask_compiler(lowered, params=None, *, label="program", cache: Path | None = None, say=lambda line: None) -> dict:
    """Compile a lowered program, or find the answer in the cache, where it lies under the program's text and versions.

    Parameters
    ----------
    lowered : jax.stages.Lowered
    params : tree, optional
        The program's second argument, to find out which of it the program does not read.
    cache : Path, optional
        A folder; without one, nothing is kept.

    Returns
    -------
    dict
        ``compile_seconds``, ``flops`` and ``bytes_accessed`` (both count a loop's body once), and ``memory``, in bytes
        on each chip; or, where the program does not fit, ``needs`` (bytes, None if the compiler does not tell) and
        ``available``.
    """
    text = json.dumps(versions()) + lowered.as_text()
    kept = cache and cache / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
    if kept and kept.exists():
        say(f"{label}: found in {cache}")
        return json.loads(kept.read_text())
    say(f"{label}: compiling {len(text) / 1e6:.1f} MB of program …")
    start = time.monotonic()
    try:
        with _heartbeat(say):
            compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        answer = {"fits": False} | _out_of_memory(str(error))
    else:
        memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
        answer = {"fits": True, "flops": cost["flops"], "bytes_accessed": cost["bytes accessed"]}
        answer["memory"] = {
            "arguments": memory.argument_size_in_bytes,
            "unread": 0 if params is None else _unread_bytes(compiled, params),
            "temporaries": memory.temp_size_in_bytes,
            "program": memory.generated_code_size_in_bytes,
            "output": memory.output_size_in_bytes,
        }
    answer["compile_seconds"] = round(time.monotonic() - start, 1)
    say(f"{label}: {answer['compile_seconds']:.0f} s")
    if kept:
        write_json(kept, answer)
    return answer


def _unread_bytes(compiled, params) -> int:
    """Bytes of parameters that lie on the chip and are not read, such as the VAE's encoder: JAX drops them."""

    def leaves(tree):  # None stands for a parameter that is not read, and for a field that a state leaves empty
        return jax.tree.leaves(tree, is_leaf=lambda leaf: leaf is None)

    pairs = zip(leaves(compiled.input_shardings[0][1]), leaves(params), strict=True)
    return tree_bytes([shape for sharding, shape in pairs if sharding is None])


def _out_of_memory(message: str) -> dict:
    """What XLA says it needs and has, in bytes; it says so in one of two ways, rounded to a hundredth of a GiB."""
    unit = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    number = r"([\d.]+)([KMGT]?)B?"
    found = re.search(rf"Used {number} of {number}", message) or re.search(
        rf"\({number}\) exceeds available HBM \({number}\)", message
    )
    if not found:
        return {"needs": None, "available": None}
    needs, needs_unit, available, available_unit = found.groups()
    return {
        "needs": int(float(needs) * unit[needs_unit]),
        "available": int(float(available) * unit[available_unit]),
    }


def write_json(path: Path, content) -> None:
    """Write a file whole or not at all, so that an interruption leaves nothing half-written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.replace(path)


def least_seconds(part: dict, chip: str) -> tuple[float, float]:
    """Seconds below which a part cannot be done on a chip: for its operations, and for reading its weights from HBM.

    Weights that fit into the memory on the chip need to be read only once in all of the part's runs.
    """
    peak = CHIPS[chip]
    weights = part["weight_bytes"]
    reads = weights + (part["runs"] - 1) * max(0, weights - peak.on_chip)
    return part["runs"] * part["flops"] / peak.flops, reads / peak.bandwidth


def memory_report(program: Program, *, cache: Path | None = None, say=lambda line: None) -> dict:
    """Whether a program fits, and what takes how much of the HBM of each chip. One compilation.

    Returns
    -------
    dict
        ``fits``, ``verdict`` (a sentence), ``hbm`` in bytes (None if the compiler gave up), ``needs`` and
        ``available`` in bytes, ``whole`` (what the compiler counts in the whole program, a loop's body once), and
        ``compile_seconds``.
    """
    pipeline, params = load_shapes(program.pipeline, program.dtype, program.split_head_dim)
    label = f"{program.pipeline} {program.dtype} {program.chip}-{program.chips} batch {program.batch}"
    say(f"{label}: lowering …")
    answer = ask_compiler(lower_program(program, pipeline, params), params, label=label, cache=cache, say=say)
    available = CHIPS[program.chip].hbm
    hbm, needs = None, answer.get("needs")
    if answer["fits"]:
        memory = answer["memory"]
        hbm = {"parameters": memory["arguments"] + memory["unread"]}
        hbm |= {kind: memory[kind] for kind in ("temporaries", "program", "output")}
        needs = sum(hbm.values())
    fits = answer["fits"] and needs <= available
    amount = f"{needs / GIB:.2f} GiB" if needs else "more"
    verdict = f"It {'fits' if fits else 'does not fit'}: the program needs {amount} of HBM on each chip, and "
    verdict += f"{available / GIB:.2f} GiB of a {program.chip} chip are there for it."
    return {
        "fits": fits,
        "verdict": verdict,
        "hbm": hbm,
        "needs": needs,
        "available": available,
        "whole": {kind: answer.get(kind) for kind in ("flops", "bytes_accessed")},
        "compile_seconds": answer["compile_seconds"],
    }


def compile_report(program: Program, *, cache: Path | None = None, say=lambda line: None) -> dict:
    """Ask the compiler about a whole program and about its parts. Seconds for a small one, minutes for a real one.

    Returns
    -------
    dict
        What ``benchmarks/report.schema.json`` describes: the program, versions and date, ``memory_report``'s answers,
        the bytes of each model's parameters, the parts, and the least seconds for a call and for a picture.
    """
    pipeline, params = load_shapes(program.pipeline, program.dtype, program.split_head_dim)
    height, width = picture_size(program, pipeline)
    settings = dataclasses.asdict(program) | {
        "pipeline": Path(program.pipeline).name,
        "height": height,
        "width": width,
        "split_head_dim": bool(pipeline.unet.config.split_head_dim),
    }
    report = {
        "program": settings,
        "versions": versions(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        **memory_report(program, cache=cache, say=say),
        "parameter_bytes": {name: tree_bytes(tree) for name, tree in params.items() if name != "scheduler"},
        "parts": [],
        "least_seconds": None,
        "least_seconds_per_picture": None,
    }
    if not report["fits"]:
        return report
    for name, (lowered, runs, weight_bytes) in lower_parts(program, pipeline, params).items():
        answer = ask_compiler(lowered, label=name, cache=cache, say=say)
        part = {"name": name, "runs": runs, "flops": answer["flops"], "weight_bytes": weight_bytes}
        by_flops, by_weights = least_seconds(part, program.chip)
        part |= {
            "bytes_accessed": answer["bytes_accessed"],
            "temporaries": answer["memory"]["temporaries"],
            "compile_seconds": answer["compile_seconds"],
            "least_seconds": max(by_flops, by_weights),
            "bound_by": "FLOPs" if by_flops >= by_weights else "weights",
        }
        report["parts"].append(part)
    report["least_seconds"] = sum(part["least_seconds"] for part in report["parts"])
    report["least_seconds_per_picture"] = report["least_seconds"] / program.batch
    return report


def largest_batch(program: Program, *, cache: Path | None = None, say=lambda line: None) -> dict:
    """Find the largest batch that fits: predicted from batches 1 and 2, and confirmed at n and n + 1.

    Returns
    -------
    dict
        ``largest`` (0 if not even one picture fits), ``predicted`` (None where two do not fit), and ``tried``, what
        each batch needs, in bytes, and whether it fits.
    """
    tried = {}

    def fits(batch: int) -> bool:
        answer = memory_report(dataclasses.replace(program, batch=batch), cache=cache, say=say)
        tried[batch] = {"batch": batch, "fits": answer["fits"], "needs": answer["needs"]}
        return answer["fits"]

    predicted, largest = None, 0
    if fits(1):
        largest = 1
        if fits(2):
            largest, each = 2, max(1, tried[2]["needs"] - tried[1]["needs"])
            predicted = 2 + (CHIPS[program.chip].hbm - tried[2]["needs"]) // each
            too_large, stride, candidate = None, 1, max(predicted, 3)
            while too_large is None or too_large - largest > 1:
                if fits(candidate):
                    largest, candidate = candidate, candidate + stride
                else:
                    too_large, candidate = candidate, candidate - stride
                stride *= 2
                candidate = max(candidate, largest + 1)
                candidate = candidate if too_large is None else min(candidate, too_large - 1)
    return {"largest": largest, "predicted": predicted, "tried": [tried[batch] for batch in sorted(tried)]}


def recorded_reports() -> list[dict]:
    """The reports in ``benchmarks/tpu``, batch 1 before the largest, sorted by their files' names; perhaps none."""
    folder = next((folder for folder in _RECORDED if folder.exists()), None)
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))] if folder else []


def text_of(report: dict) -> str:
    """A report as a page of text."""
    p = report["program"]
    lines = [
        f"{p['pipeline']}, {p['height']} × {p['width']} pixels, {p['steps']} steps, {p['dtype']}, batch {p['batch']} "
        f"on each of {p['chips']} {p['chip']} chip(s), by {p['parallel']}",
        report["verdict"],
    ]
    if "largest_batch" in report:
        lines.append(largest_sentence(report["largest_batch"], p["chip"]))
    if report["hbm"]:
        lines += ["", f"{'HBM on each chip':<20}{'GiB':>8}"]
        lines += [f"{kind:<20}{size / GIB:>8.3f}" for kind, size in report["hbm"].items()]
    if report["parts"]:
        lines += [
            "",
            f"{'part':<16}{'runs':>5}{'TFLOP':>9}{'weights':>11}{'accessed*':>11}{'least time':>12}  bound by",
        ]
    for part in report["parts"]:
        lines.append(
            f"{part['name']:<16}{part['runs']:>5}{part['flops'] / 1e12:>9.3f}{part['weight_bytes'] / 1e9:>8.3f} GB"
            f"{part['bytes_accessed'] / 1e9:>8.2f} GB{part['least_seconds'] * 1e3:>9.2f} ms  {part['bound_by']}"
        )
    if report["parts"]:
        lines += [
            "TFLOP, weights and bytes are those of one run. *The compiler's estimate, perhaps above what is needed.",
            "",
            f"A call takes at least {report['least_seconds']:.3g} s, "
            f"a picture {report['least_seconds_per_picture']:.3g} s.",
        ]
    used = report["versions"]
    seconds = report["compile_seconds"]
    lines.append(f"Compiled in {seconds:.0f} s on {report['date']} by libtpu {used['libtpu']}, jax {used['jax']}.")
    return "\n".join(lines)


def largest_sentence(found: dict, chip: str) -> str:
    """What ``largest_batch`` found, in a sentence."""
    if found["largest"] == 0:
        return f"None fits: not even one picture at a time can be drawn on a {chip} chip."
    said = f"The largest batch that fits on a {chip} chip is {found['largest']}"
    return said + (f" ({found['predicted']} was predicted)." if found["predicted"] else ".")


def table_of(reports: list[dict]) -> str:
    """Reports as a table of text, a line for each."""
    head = f"{'program':<44}{'batch':>6}{'needs':>11}{'of':>11}  {'fits':<6}{'a picture takes at least':>26}"
    lines = [head]
    for report in reports:
        p = report["program"]
        name = f"{p['pipeline']} {p['height']}×{p['width']}, {p['steps']} steps, {p['dtype']}, {p['chip']}"
        name += "" if p["split_head_dim"] == (p["pipeline"] == "sdxl") else ", other heads"
        needs = f"{report['needs'] / GIB:.2f} GiB" if report["needs"] else "?"
        least = report["least_seconds_per_picture"]
        shown = f"{least:.3f} s" if least else "-"
        room, fits = f"{report['available'] / GIB:.2f} GiB", "yes" if report["fits"] else "no"
        lines.append(f"{name:<44}{p['batch']:>6}{needs:>11}{room:>11}  {fits:<6}{shown:>26}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m helpers.tpu", description=__doc__.split("\n")[0])
    parser.add_argument("pipeline", nargs="?", default="shapes-sd", help="sd, sdxl, a bundled checkpoint, or a folder")
    parser.add_argument("--chip", default="v5e", help=", ".join(CHIPS))
    parser.add_argument("--chips", type=int, default=1, help="1, 4 or 8")
    parser.add_argument("--batch", type=int, default=1, help="pictures that each chip draws in a call")
    parser.add_argument("--height", type=int)
    parser.add_argument("--width", type=int)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16 or float32")
    parser.add_argument("--program", dest="parallel", default="pmap", help="pmap, or jit (with shardings)")
    parser.add_argument("--split-head-dim", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--largest-batch", action="store_true", help="look for the largest batch that fits")
    parser.add_argument("--recorded", action="store_true", help="print the recorded reports, and compile nothing")
    parser.add_argument("--json", action="store_true", help="print JSON in the place of text")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="folder of answers (%(default)s)")
    options = vars(parser.parse_args(arguments))
    as_json, cache, look = options.pop("json"), options.pop("cache"), options.pop("largest_batch")
    if options.pop("recorded"):
        reports = recorded_reports()
        print(json.dumps(reports, indent=1) if as_json else table_of(reports))
        return 0
    diffusers.logging.set_verbosity_error()
    transformers.logging.set_verbosity_error()
    jax.config.update("jax_platforms", "cpu")  # chips that are there are left alone

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    try:
        program = Program(**options)
        require_compiler()
        report = {}
        if look:
            found = largest_batch(program, cache=cache, say=say)
            program = dataclasses.replace(program, batch=max(1, found["largest"]))
            report = {"largest_batch": found}
        report = compile_report(program, cache=cache, say=say) | report
    except (ValueError, RuntimeError) as error:
        if isinstance(error, jax.errors.JaxRuntimeError):
            raise  # nothing that a sentence could explain
        say(str(error))
        return 1
    print(json.dumps(report, indent=1) if as_json else text_of(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
