"""A step of denoising, split over chips in one of several ways: the function, and shapes on a mesh.

A mesh has two axes here. Along ``data``, chips have images of their own, or each one half of an
image's guidance, as the batch has both next to one another. Along the other axis chips share what
is left: with tensor parallelism its name is ``model``, and else ``tokens``, which of Stable
Diffusion are pixels.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from course import flux2, sd
from course.families import Config, code_of
from course.flux2.offload import HOST
from course.model.attention import check_whole_heads, plain
from course.sd.unet import Condition, blocks
from course.tpu.chips import tpu_devices
from course.tpu.compiler import ask_compiler
from course.tpu.pieces import array, flux2_step, flux2_text_length, load_config
from course.tpu.programs import Program
from course.tpu.records import answer_of

DATA = "data"
FULLY_SHARDED = "fully sharded"
# Several chips share an image. In the first and the third the partitioner adds what is exchanged.
TENSOR = "tensor"
TENSOR_BY_HAND = "tensor by hand"  # `course.flux2.split_heads`
CONTEXT = "context"
BY_HAND = ("Ulysses", "ring")  # as `course.model.attention` does


class Way(NamedTuple):
    """How the work is split over chips."""

    kind: str  #: `DATA`, `FULLY_SHARDED`, or one of `sharing_kinds`
    images: int = 1  #: groups of chips that have images of their own
    halves: int = 1  #: 2 where each half of guidance has chips of its own
    share: int = 1  #: chips that share what is left

    @property
    def groups(self) -> int:
        """How many groups of chips there are, which exchange almost nothing with one another."""
        return self.images * self.halves

    @property
    def mesh(self) -> dict[str, int]:
        """The axes of the mesh, and how many chips each has."""
        return {"data": self.groups, "model" if self.splits_heads else "tokens": self.share}

    @property
    def splits_heads(self) -> bool:
        """Whether it is tensor parallelism, in which a chip has all tokens."""
        return self.kind in (TENSOR, TENSOR_BY_HAND)

    @property
    def rules(self) -> str:
        """The name of the table of rules for the parameters, in ``course.sd`` or ``flux2``."""
        if self.splits_heads:
            return "TENSOR_PARALLEL"
        return "FULLY_SHARDED" if self.kind == FULLY_SHARDED else "DATA_PARALLEL"

    def __str__(self) -> str:
        if self.kind == FULLY_SHARDED:
            return f"{self.kind} over {self.groups}"
        parts = [("data", self.images), ("guidance", self.halves), (self.kind, self.share)]
        return " × ".join(f"{name} over {number}" for name, number in parts if number > 1)


def sharing_kinds(config: Config) -> tuple[str, ...]:
    """Return the kinds of ways in which several chips share an image, for a model."""
    if isinstance(config, flux2.Config):
        return (TENSOR, TENSOR_BY_HAND, CONTEXT, *BY_HAND)
    return (TENSOR, CONTEXT, *BY_HAND)


def find_ways(config: Config, images: int, chips: int, guided: bool) -> list[Way]:
    """List ways to split a step for so many images over so many chips.

    There are as many groups of chips as have a run of the model of their own, as many as have an
    image of their own, and one. First are those in which most groups have something of their own,
    and last all chips share everything. Some may not fit the model, see `check_way`.
    """
    runs = 2 * images if guided else images
    numbers = {math.gcd(images, chips), math.gcd(runs, chips), 1}
    ways = []
    for groups in sorted(numbers, reverse=True):
        apart = math.gcd(images, groups)
        halves, share = groups // apart, chips // groups
        kinds = (DATA, FULLY_SHARDED) if share == 1 else sharing_kinds(config)
        ways += [Way(kind, apart, halves, share) for kind in kinds]
    return ways


def check_way(way: Way, config: Config, program: Program) -> None:
    """Raise ``ValueError``, of one sentence, if a model cannot be split in some way."""
    if way.share > 1:
        check_share(way, config, program)
    package = code_of(config)
    mesh = AbstractMesh(tuple(way.mesh.values()), tuple(way.mesh))
    package.shardings(config, mesh, getattr(package, way.rules))  # it refuses what it cannot divide


def check_share(way: Way, config: Config, program: Program) -> None:
    """Raise ``ValueError`` unless chips can share heads and tokens, or rows of pixels."""
    if isinstance(config, flux2.Config):
        heads = {config.transformer.num_attention_heads}
        rows, columns = flux2.size_in_tokens(config, program.height, program.width)
        texts = flux2_text_length(program, config)
        lengths = {
            f"{rows * columns} tokens of the image": rows * columns,
            f"{texts} tokens of the text": texts,
        }
    else:
        levels = len(config.unet.block_out_channels)
        heads = {block.heads for block in blocks(config.unet) if block.kind == "transformer"}
        rows = program.height // config.pixels_per_latent // 2 ** (levels - 1)
        lengths = {f"{rows} rows of pixels on the lowest level": rows}
    for number in sorted(heads):
        if way.kind == "Ulysses":
            check_whole_heads(number, way.share)
        if way.splits_heads:
            check_whole_heads(number, way.share, "Tensor parallelism")
    pads = way.kind in BY_HAND and isinstance(config, flux2.Config)
    for name, length in lengths.items():
        if length % way.share and not way.splits_heads and not pads:
            raise ValueError(f"{name} cannot be divided by {way.share} chips.")


# Shapes on a mesh


def make_mesh(chip: str, sizes: dict[str, int]) -> Mesh:
    """Return `mesh_of` chips that are not there; ``sizes`` has as many for each of its axes."""
    return mesh_of(tpu_devices(chip, math.prod(sizes.values())), sizes)


def mesh_of(devices: list, sizes: dict[str, int]) -> Mesh:
    """Return a mesh of devices; TPU chips that lie in two rows are ordered by their places.

    Along the last axis with several chips neighbours are then neighbours on the grid, and so are
    the last chip and the first. In ``jax.make_mesh`` half of eight chips' neighbours are two links
    apart: it expects rows along x, and those of v5e and v6e lie along y. It makes the mesh of all
    other devices.

    Parameters
    ----------
    devices : list of jax.Device
    sizes : dict
        For each axis of the mesh, over how many devices it goes.

    Raises
    ------
    ValueError
        If chips lie in two rows, and the last axis with several of them goes over an odd number.
    """
    types = (AxisType.Auto,) * len(sizes)
    shape = tuple(sizes.values())
    rows = two_rows(devices)
    if not rows:
        return jax.make_mesh(shape, tuple(sizes), devices=devices, axis_types=types)
    near, far = rows
    around = next(size for size in reversed(shape) if size > 1)
    if around % 2:
        raise ValueError(f"{around} chips of two rows are no ring: split over an even number.")
    length = around // 2
    rings = [
        near[at : at + length] + far[at : at + length][::-1] for at in range(0, len(near), length)
    ]
    return Mesh(np.array(rings).reshape(shape), tuple(sizes), axis_types=types)


def two_rows(devices: list) -> list[list]:
    """Return the two rows in which chips lie, each in order; none if they do not lie so."""
    by_place = {tuple(device.coords): device for device in devices if hasattr(device, "coords")}
    if len(by_place) < len(devices):  # no TPUs, or several devices on a chip
        return []
    sides = np.ptp(list(by_place), axis=0) + 1
    if sorted(sides)[:2] != [1, 2] or math.prod(sides) != len(devices):
        return []
    across = list(sides).index(2)
    rows = {}
    for place in sorted(by_place):
        rows.setdefault(place[across], []).append(by_place[place])
    return [rows[number] for number in sorted(rows)]


def place(shapes, sharding):
    """Return shapes that lie somewhere: all by one sharding, or each by one of a tree."""
    if isinstance(sharding, NamedSharding):
        sharding = jax.tree.map(lambda _: sharding, shapes)
    return jax.tree.map(lambda shape, where: shape.update(sharding=where), shapes, sharding)


def split_as_far_as(mesh: Mesh, shape: tuple[int, ...], *axes: str | None) -> NamedSharding:
    """Return a sharding over these axes of a mesh, but for those that it lacks or cannot divide."""
    spec = []
    for size, axis in zip(shape, axes, strict=False):
        fits = axis in mesh.shape and size % mesh.shape[axis] == 0
        spec.append(axis if fits else None)
    return NamedSharding(mesh, P(*spec))


def bytes_on_chip(params: dict) -> int:
    """Return the bytes of the parameters on each chip, without those that wait on its host."""
    total = 0
    for shape in jax.tree.leaves(params):
        if shape.sharding and shape.sharding.memory_kind == HOST:
            continue
        sides = shape.sharding.shard_shape(shape.shape) if shape.sharding else shape.shape
        total += math.prod(sides) * shape.dtype.itemsize
    return total


# A step


class Step(NamedTuple):
    """A function whose first argument is parameters, and shapes that say where they lie."""

    function: Callable
    arguments: tuple
    output: NamedSharding | None  #: where the result lies


def place_step(program: Program, guided: bool, way: Way, mesh: Mesh | None) -> Step:
    """Return a step that is split in some way, for `ask_split`.

    Raises
    ------
    ValueError
        If the model cannot be split so.
    """
    config = load_config(program.model)
    check_way(way, config, program)
    if isinstance(config, flux2.Config):
        return _flux2_step(program, config, guided, way, mesh)
    return _sd_step(program, config, guided, way, mesh)


def whole_step(program: Program, guided: bool) -> Step:
    """Return the same step for one device."""
    return place_step(program, guided, Way(DATA), None)


def denoiser_shapes(part: str, program: Program, config: Config, way: Way, mesh: Mesh | None):
    """Return the shapes of one part's parameters, on the mesh if there is one."""
    package = code_of(config)
    shapes = package.parameter_shapes(config, program.dtype)[part]
    if mesh is None:
        return shapes
    return place(shapes, package.shardings(config, mesh, getattr(package, way.rules))[part])


def _flux2_step(
    program: Program, config: flux2.Config, guided: bool, way: Way, mesh: Mesh | None
) -> Step:
    piece = flux2_step(program, flux2_velocity(way, mesh), guided)
    _, noisy, texts, time = piece.arguments
    p = denoiser_shapes("transformer", program, config, way, mesh)
    if mesh is None:
        return Step(piece.function, (p, noisy, texts, time), None)
    output = (texts.shape[0], *noisy.shape[1:])
    arguments = (
        p,
        place(noisy, split_as_far_as(mesh, noisy.shape, "data", "tokens")),
        place(texts, split_as_far_as(mesh, texts.shape, "data", "tokens")),
        place(time, NamedSharding(mesh, P())),
    )
    return Step(piece.function, arguments, split_as_far_as(mesh, output, "data", "tokens"))


def flux2_velocity(way: Way, mesh: Mesh | None) -> Callable:
    """Return what stands in the place of ``flux2.velocity``."""
    if mesh is None:
        return flux2.velocity
    call = flux2_call(way)
    return getattr(flux2, call.name)(mesh, **call.options)


class Call(NamedTuple):
    """A function of ``course.flux2`` or ``course.sd``, which is called with the mesh."""

    name: str
    options: dict[str, str]


def flux2_call(way: Way) -> Call:
    """Return what gives the function for ``velocity`` of ``flux2.generate``."""
    if way.kind == DATA:  # one chip has all tokens, and exchanges nothing
        return Call("split_tokens", {"way": "ulysses", "images": "data"})
    if way.kind in BY_HAND:
        return Call("split_tokens", {"way": way.kind.lower(), "images": "data"})
    if way.kind == TENSOR_BY_HAND:
        return Call("split_heads", {"images": "data"})
    if way.kind == CONTEXT:
        return Call("keep_tokens", {"tokens": "tokens", "images": "data"})
    return Call("keep_tokens", {"images": "data"})


def _sd_step(
    program: Program, config: sd.Config, guided: bool, way: Way, mesh: Mesh | None
) -> Step:
    attention = sd_attention(way, mesh)

    def step(p, latents, timestep, condition, guidance):
        return sd.denoise_step(
            {"unet": p},
            config,
            latents,
            timestep,
            condition,
            guidance,
            attention=attention,
            guided=guided,
        )

    params = sd.parameter_shapes(config, program.dtype)
    tokens = config.text[0].max_position_embeddings
    ids = array(program.batch, len(config.text), tokens, dtype=jnp.int32)

    def encode(params, ids):
        return sd.encode_condition(
            params,
            config,
            ids,
            ids if guided else None,
            height=program.height,
            width=program.width,
            guided=guided,
        )

    condition = jax.eval_shape(encode, params, ids)
    side = config.pixels_per_latent
    latents = array(
        program.batch, program.height // side, program.width // side, config.unet.in_channels
    )
    number = array()
    p = denoiser_shapes("unet", program, config, way, mesh)
    if mesh is None:
        return Step(step, (p, latents, number, condition, number), None)

    def on_chips(shape, *axes):
        return place(shape, split_as_far_as(mesh, shape.shape, *axes))

    words = {}
    for name, pair in condition.words.items():  # (layers, batch, tokens, heads, size)
        words[name] = tuple(on_chips(each, None, "data", None, "model") for each in pair)
    whole = condition.whole if condition.whole is None else on_chips(condition.whole, "data")
    latents = on_chips(latents, "data", "tokens")
    number = on_chips(number)
    arguments = (p, latents, number, Condition(words, whole), number)
    return Step(step, arguments, latents.sharding)


def sd_attention(way: Way, mesh: Mesh | None) -> Callable:
    """Return an attention. The compiler does not split a kernel, so it is none of these."""
    call = sd_call(way)
    if mesh is None or call is None:
        return plain
    return getattr(sd, call.name)(mesh, **call.options)


def sd_call(way: Way) -> Call | None:
    """Return what gives the function for ``attention`` of ``sd.generate``; None for ``plain``."""
    if way.kind in BY_HAND:
        return Call("split_pixels", {"way": way.kind.lower(), "images": "data"})
    return None


# Asking


def ask_way(program: Program, guided: bool, way: Way, timeout: float | None = None) -> dict:
    """Ask the compiler about a step in some way; return an answer for `records.read_split`."""
    mesh = make_mesh(program.chip, way.mesh)
    step = place_step(program, guided, way, mesh)
    used = {axis: number for axis, number in way.mesh.items() if number > 1}
    return ask_split(
        step.function,
        step.arguments,
        mesh,
        program.chip,
        output=step.output,
        timeout=timeout,
        sizes=used,
        images=program.batch,
    )


def ask_split(
    function: Callable,
    arguments: tuple,
    mesh: Mesh,
    chip: str,
    *,
    output: NamedSharding,
    sizes: dict[str, int],
    images: int,
    timeout: float | None = None,
) -> dict:
    """Ask the compiler about a function whose arguments lie on a mesh.

    Parameters
    ----------
    function : callable
        Its first argument are parameters.
    arguments : tuple
        Shapes with shardings.
    mesh : jax.sharding.Mesh
        It is set while the function is traced.
    chip : str
        A key of `CHIPS`.
    output : NamedSharding
        Of the result.
    sizes : dict
        The axes of the mesh, as the answer has them.
    images : int
        Drawn at a time by all chips together.
    timeout : float, optional
        See `course.tpu.ask_compiler`.
    """
    function = jax.jit(function, out_shardings=output)
    with jax.set_mesh(mesh):
        report = ask_compiler(function, *arguments, chip=chip, timeout=timeout)
    return answer_of(report, mesh=sizes, images=images, parameters=bytes_on_chip(arguments[0]))
