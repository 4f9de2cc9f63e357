"""Matrix products and convolutions, and what they take once they fill the tiles of a TPU's MXU.

The MXU, a TPU's matrix unit, is a square of multipliers: 128 × 128, or 256 × 256 from v6e on. It
holds a tile of one matrix, and the rows of the other stream past it. A matrix that is narrower than
the tile leaves multipliers without work, and they take their time all the same.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from jax.extend.core import JaxprEqn

from course.tpu.equations import equations_of

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
        """Operations once depth and columns are filled up to multiples of the MXU's tile.

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
            * fill_up(self.rows, rows)
            * fill_up(self.depth, tile)
            * fill_up(self.columns, tile)
        )


def fill_up(size: int, multiple: int) -> int:
    """The next multiple."""
    return multiple * math.ceil(size / multiple)


def find_products(function: Callable, *arguments) -> dict[Product, int]:
    """The matrix products and convolutions of a function, each with how often it runs.

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
    found = Counter()
    for equation, count in equations_of(function, *arguments):
        product = read_product(equation)
        if product:
            found[product] += count
    return dict(found)


def repeated_flops(function: Callable, *arguments) -> int:
    """Operations of the products in all rounds of ``jax.lax.scan`` but the first.

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
    """The products that an operation of `equations_of` is; None if it is none."""
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
