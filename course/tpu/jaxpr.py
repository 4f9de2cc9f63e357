"""What JAX traces of a function says, without a compiler: its products, and its kernels' bytes.

A TPU's matrix unit, the MXU, is a square of multipliers: 128 × 128, or 256 × 256 from v6e on. It
holds a tile of one matrix, and the rows of the other stream past it. A matrix that is narrower than
the tile leaves multipliers without work, and they take their time all the same.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxpr_as_fun

ROWS = 8  #: rows that a TPU handles at once, so their number is filled up to a multiple of it


@dataclass(frozen=True)
class Product:
    """Products of a matrix (rows, depth) with a matrix (depth, columns), all of one size.

    A convolution whose kernel has 3 × 3 places is nine of them: at each place, the channels of all
    pixels by a matrix (input channels, output channels).
    """

    number: int  #: heads of a batch for attention, places of the kernel for a convolution
    rows: int  #: such as pixels, or tokens
    depth: int  #: what is summed over
    columns: int  #: of the result

    @property
    def flops(self) -> int:
        """Floating-point operations, a multiplication and an addition for each summand."""
        return 2 * self.number * self.rows * self.depth * self.columns

    def padded_flops(self, tile: int, rows: int = ROWS) -> int:
        """Count operations once depth and columns are filled up to multiples of the MXU's tile.

        Rows stream past the tile, so they are filled up to multiples of 8 only. But loading a tile
        takes as long as that many rows, so with fewer the MXU waits: ``rows=tile`` counts this,
        too, and is the more pessimistic rule. Neither says how a compiler really lays things out.

        Examples
        --------
        The scores of a head with 64 channels fill half of a tile that is 128 deep:

        >>> scores = Product(number=1, rows=4096, depth=64, columns=4096)
        >>> scores.padded_flops(128) / scores.flops
        2.0
        """
        return (
            2
            * self.number
            * round_up(self.rows, rows)
            * round_up(self.depth, tile)
            * round_up(self.columns, tile)
        )


def round_up(size: int, multiple: int) -> int:
    """Return the next multiple."""
    return multiple * math.ceil(size / multiple)


def find_products(function: Callable, *arguments) -> dict[Product, int]:
    """Count the matrix products and convolutions of a function, each with how often it runs.

    It traces the function, and compiles nothing. How loops and branches count, `equations_of` says.

    Parameters
    ----------
    function : callable
        A function of arrays.
    *arguments
        Trees of ``jax.ShapeDtypeStruct``, or of arrays.

    Examples
    --------
    >>> import jax
    >>> rows = jax.ShapeDtypeStruct((1024, 1280), "bfloat16")
    >>> weights = jax.ShapeDtypeStruct((1280, 5120), "bfloat16")
    >>> find_products(lambda x, weights: x @ weights, rows, weights)
    {Product(number=1, rows=1024, depth=1280, columns=5120): 1}
    """
    counts = Counter()
    for equation, count in equations_of(function, *arguments):
        product = read_product(equation)
        if product:
            counts[product] += count
    return dict(counts)


def repeated_flops(function: Callable, *arguments) -> int:
    """Count the operations of the products in all rounds of ``jax.lax.scan`` but the first.

    They are what the compiler leaves out, because it counts a loop's body once. What a Pallas
    kernel does, it counts by the kernel's declaration.

    Examples
    --------
    >>> import jax
    >>> x = jax.ShapeDtypeStruct((8, 8), "float32")
    >>> weights = jax.ShapeDtypeStruct((10, 8, 8), "float32")
    >>> def run(x, weights):
    ...     return jax.lax.scan(lambda x, weight: (x @ weight, None), x, weights)
    >>> repeated_flops(run, x, weights) == 9 * 2 * 8**3
    True
    """
    total = 0
    for equation, count in equations_of(function, *arguments, kernels=False):
        product = read_product(equation)
        if product:
            total += (count - 1) * product.flops
    return total


def read_product(equation: JaxprEqn) -> Product | None:
    """Return the products that an operation of `equations_of` is; None if it is none."""
    if equation.primitive.name == "dot_general":
        return _read_dot(equation)
    if equation.primitive.name == "conv_general_dilated":
        return _read_convolution(equation)
    return None


def _read_dot(equation: JaxprEqn) -> Product:
    left, right = (operand.aval.shape for operand in equation.invars)
    (left_summed, right_summed), (left_batch, right_batch) = equation.params["dimension_numbers"]
    rows = 1
    for axis, size in enumerate(left):
        if axis not in (*left_summed, *left_batch):
            rows *= size
    columns = 1
    for axis, size in enumerate(right):
        if axis not in (*right_summed, *right_batch):
            columns *= size
    return Product(
        number=math.prod(left[axis] for axis in left_batch),
        rows=rows,
        depth=math.prod(left[axis] for axis in left_summed),
        columns=columns,
    )


def _read_convolution(equation: JaxprEqn) -> Product:
    (result,) = equation.outvars
    kernel = equation.invars[1].aval.shape
    # Where the kernel has its channels, and where its places.
    outputs, inputs, *places = equation.params["dimension_numbers"].rhs_spec
    groups = equation.params["feature_group_count"]
    return Product(
        number=groups * math.prod(kernel[axis] for axis in places),
        rows=result.aval.size // kernel[outputs],
        depth=kernel[inputs],
        columns=kernel[outputs] // groups,
    )


def kernel_bytes(function: Callable, *arguments) -> int:
    """Count the bytes that a function's Pallas kernels move between HBM and the chip's own memory.

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
    """Return how often a block is fetched, or written, while a kernel goes through its grid."""
    steps = math.prod(mapping.grid)
    if steps <= 1 or mapping.num_index_operands:
        return steps
    # The places of the grid in their order, (axes, steps).
    places = np.indices(mapping.grid, dtype=np.int32).reshape(len(mapping.grid), steps)
    index_map = jax.vmap(jaxpr_as_fun(block.index_map_jaxpr))
    needed = np.stack(index_map(*places))  # (axes of the array, steps)
    changes = (needed[:, 1:] != needed[:, :-1]).any(axis=0)
    return 1 + int(changes.sum())


def equations_of(
    function: Callable, *arguments, kernels: bool = True
) -> Iterator[tuple[JaxprEqn, int]]:
    """Go through the operations of a function, and of all functions that it calls.

    Builds on ``jax.make_jaxpr``. What runs again and again is given once, with its number: the body
    of a ``scan`` as often as the scan is long, and that of a Pallas kernel for each place of its
    grid. How long a ``while`` loop runs nobody knows beforehand, so its body counts once, as with
    the compiler. Of ``jax.lax.platform_dependent`` it takes what a TPU would run; of another
    ``cond`` all branches, which is too much.

    Parameters
    ----------
    function : callable
        A function of arrays.
    *arguments
        Trees of ``jax.ShapeDtypeStruct``, or of arrays.
    kernels : bool
        Whether to go through the operations of Pallas kernels, too.

    Yields
    ------
    tuple
        An operation, and how often it runs.

    Examples
    --------
    >>> x = jax.ShapeDtypeStruct((8, 8), "float32")
    >>> for equation, count in equations_of(lambda x: x @ x + 1, x):
    ...     print(count, equation.primitive.name)
    1 dot_general
    1 add
    """
    yield from _walk(jax.make_jaxpr(function)(*arguments).jaxpr, 1, kernels)


def _walk(jaxpr: Jaxpr, count: int, kernels: bool) -> Iterator[tuple[JaxprEqn, int]]:
    for equation in jaxpr.eqns:
        yield equation, count
        params = equation.params
        inner_count = count
        inner = list(params.values())
        if equation.primitive.name == "scan":
            inner_count = count * params["length"]
        elif equation.primitive.name == "pallas_call":
            inner_count = count * math.prod(params["grid_mapping"].grid)
            inner = [params["jaxpr"]] if kernels else []
        elif params.get("branches_platforms"):
            inner = [_branch_for_tpus(params)]
        for value in inner:
            for inner_jaxpr in _jaxprs_in(value):
                yield from _walk(inner_jaxpr, inner_count, kernels)


def _branch_for_tpus(params: dict) -> ClosedJaxpr:
    """Return the branch of ``platform_dependent`` for TPUs, or the one for all others."""
    for branch, platforms in zip(params["branches"], params["branches_platforms"], strict=True):
        if platforms is None or "tpu" in platforms:
            return branch
    raise ValueError(
        "The function has no branch for TPUs in jax.lax.platform_dependent: give it tpu= or "
        "default=."
    )


def _jaxprs_in(value) -> Iterator[Jaxpr]:
    """Yield the functions, as JAX traced them, in a parameter of an operation."""
    if isinstance(value, ClosedJaxpr):
        yield value.jaxpr
    elif isinstance(value, Jaxpr):
        yield value
    elif isinstance(value, tuple | list):
        for entry in value:
            yield from _jaxprs_in(entry)
