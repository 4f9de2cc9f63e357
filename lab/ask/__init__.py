"""What the subjects share that ask the TPU compiler: `lab.record` asks, and writes the answers."""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from course.tpu import Report, ask_compiler, tpu_devices
from course.tpu.hlo import Collective
from course.tpu.records import Exchange


def answer_of(report: Report, **more) -> dict:
    """Return a report as a record has it, see `course.tpu.records.read_report`, and more figures.

    Collectives are added up, and copies are left out unless the text was asked for.
    """
    exchanges = add_up(report.collectives)
    copies = report.copies if report.text else None
    content = dataclasses.asdict(dataclasses.replace(report, collectives=(), copies=copies))
    del content["date"], content["versions"]  # a row has them
    return {"report": content, "exchanges": exchanges} | more


def add_up(collectives: Iterable[Collective]) -> list[dict]:
    """Return what devices exchange by each kind of collective, as often as a loop goes round."""
    found = {}
    for each in collectives:
        before = found.get((each.kind, each.is_async), Exchange(each.kind, each.is_async, 0, 0, 0))
        found[each.kind, each.is_async] = Exchange(
            each.kind,
            each.is_async,
            number=before.number + 1,
            runs=before.runs + each.runs,
            bytes=before.bytes + each.runs * each.bytes,
        )
    return [dataclasses.asdict(exchange) for exchange in found.values()]


class Way(NamedTuple):
    """How the work is split over chips."""

    mesh: dict[str, int]  # the sizes of its axes; empty for one chip
    rules: dict[str, str]  # for the parameters
    spec: P  # of inputs and outputs, whose axes are the images and then rows or tokens
    images: int  # drawn at a time by all chips together
    by_shard_map: bool = False  # instead of letting the compiler split the program


def make_mesh(way: Way, chip: str) -> Mesh:
    """Return a mesh of chips that are not there."""
    devices = tpu_devices(chip, math.prod(way.mesh.values()))
    return Mesh(np.array(devices).reshape(*way.mesh.values()), tuple(way.mesh))


def place(shapes, sharding):
    """Return shapes that lie somewhere: all by one sharding, or each by one of a tree."""
    if isinstance(sharding, NamedSharding):
        sharding = jax.tree.map(lambda _: sharding, shapes)
    return jax.tree.map(lambda shape, where: shape.update(sharding=where), shapes, sharding)


def ask_split(function: Callable, arguments: tuple, way: Way, mesh: Mesh, chip: str) -> dict:
    """Ask about a function whose arguments lie on a mesh; the first are the parameters."""
    if way.by_shard_map:
        # Each chip has the program of one chip alone.
        specs = (P(), *(way.spec for _ in arguments[1:]))
        function = jax.shard_map(
            function, mesh=mesh, in_specs=specs, out_specs=way.spec, check_vma=False
        )
    function = jax.jit(function, out_shardings=NamedSharding(mesh, way.spec))
    with jax.set_mesh(mesh):
        report = ask_compiler(function, *arguments, chip=chip)
    return split_answer(report, way, arguments[0])


def split_answer(report: Report, way: Way, params: dict) -> dict:
    """Return the answer about a program that is split in some way, or runs on one chip."""
    return answer_of(report, mesh=way.mesh, images=way.images, parameters=bytes_on_chip(params))


def bytes_on_chip(params: dict) -> int:
    """Return the bytes of the parameters on each chip."""
    total = 0
    for shape in jax.tree.leaves(params):
        sides = shape.sharding.shard_shape(shape.shape) if shape.sharding else shape.shape
        total += math.prod(sides) * shape.dtype.itemsize
    return total
