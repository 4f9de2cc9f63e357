"""What a Pallas kernel fetches and writes, by its grid: what it declares can be far less."""

import math
from collections.abc import Callable

import jax
import numpy as np
from jax.extend.core import JaxprEqn, jaxpr_as_fun

from course.tpu.equations import equations_of


def kernel_bytes(function: Callable, *arguments) -> int:
    """Bytes that the Pallas kernels of a function move between HBM and the chip's own memory.

    A kernel runs once for each place of its grid, the last axis fastest. For each array, an index
    map says which block of it the kernel needs there. A block stays while the map's answer stays
    the same, and is fetched, or written, when it changes. So a block that is needed again later is
    fetched again, and a kernel's ``cost_estimate`` need not tell. This follows from the kernel's
    definition; nothing is measured.

    Numbers count, and not what fills up tiles: of an array whose last axis has 64 numbers, a chip
    moves twice as much. Where a block reaches beyond its array, it counts whole. Blocks whose index
    map reads scalars that only a run knows count at each place of the grid, which is too much. What
    a kernel fetches by itself, without a block, counts as read once, which can be too little.

    Parameters
    ----------
    function : callable
        A function of arrays. Of ``jax.lax.platform_dependent`` its branch for TPUs counts.
    *arguments
        Trees of ``jax.ShapeDtypeStruct``, or of arrays.

    Returns
    -------
    int
        Bytes of all kernels together; 0 if the function has none.

    Examples
    --------
    A kernel that adds two arrays in four blocks each reads both once, and writes the result:

    >>> from jax.experimental import pallas as pl
    >>> def add(x_ref, y_ref, sum_ref):
    ...     sum_ref[...] = x_ref[...] + y_ref[...]
    >>> x = jax.ShapeDtypeStruct((512, 128), "float32")
    >>> block = pl.BlockSpec((128, 128), lambda i: (i, 0))
    >>> kernel = pl.pallas_call(add, x, grid=4, in_specs=[block, block], out_specs=block)
    >>> kernel_bytes(kernel, x, x) == 3 * 512 * 128 * 4
    True
    """
    total = 0
    for equation, count in equations_of(function, *arguments):
        if equation.primitive.name == "pallas_call":
            total += count * _bytes_of(equation)
    return total


def _bytes_of(equation: JaxprEqn) -> int:
    mapping = equation.params["grid_mapping"]
    total = 0
    for block in mapping.block_mappings:
        numbers = 1
        for side in block.block_shape:
            # A side that the kernel does not see is 1 long.
            numbers *= getattr(side, "block_size", side if isinstance(side, int) else 1)
        # In JAX 0.7 and 0.8 the array's type is called array_shape_dtype.
        array = getattr(block, "array_aval", None) or block.array_shape_dtype
        total += _fetches(block, mapping) * numbers * array.dtype.itemsize
    return total


def _fetches(block, mapping) -> int:
    """How often a block is fetched, or written, while a kernel goes through its grid."""
    steps = math.prod(mapping.grid)
    if steps <= 1 or mapping.num_index_operands:
        return steps
    # The places of the grid in their order, (axes, steps).
    places = np.indices(mapping.grid, dtype=np.int32).reshape(len(mapping.grid), steps)
    index_map = jax.vmap(jaxpr_as_fun(block.index_map_jaxpr))
    needed = np.stack(index_map(*places))  # (axes of the array, steps)
    changes = (needed[:, 1:] != needed[:, :-1]).any(axis=0)
    return 1 + int(changes.sum())
