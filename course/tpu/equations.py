"""What JAX traces of a function, one operation after another: it compiles and runs nothing."""

import math
from collections.abc import Callable, Iterator

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn


def equations_of(function: Callable, *arguments) -> Iterator[tuple[JaxprEqn, int]]:
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
    yield from _walk(jax.make_jaxpr(function)(*arguments).jaxpr, 1)


def _walk(jaxpr: Jaxpr, count: int) -> Iterator[tuple[JaxprEqn, int]]:
    for equation in jaxpr.eqns:
        yield equation, count
        params = equation.params
        inner_count = count
        inner = list(params.values())
        if equation.primitive.name == "scan":
            inner_count = count * params["length"]
        elif equation.primitive.name == "pallas_call":
            inner_count = count * math.prod(params["grid_mapping"].grid)
            inner = [params["jaxpr"]]
        elif params.get("branches_platforms"):
            inner = [_branch_for_tpus(params)]
        for value in inner:
            for inner_jaxpr in _jaxprs_in(value):
                yield from _walk(inner_jaxpr, inner_count)


def _branch_for_tpus(params: dict) -> ClosedJaxpr:
    """Of the branches of ``platform_dependent`` that for TPUs, or the one for all others."""
    for branch, platforms in zip(params["branches"], params["branches_platforms"], strict=True):
        if platforms is None or "tpu" in platforms:
            return branch
    raise ValueError(
        "The function has no branch for TPUs in jax.lax.platform_dependent: give it tpu= or "
        "default=."
    )


def _jaxprs_in(value) -> Iterator[Jaxpr]:
    """The functions, as JAX traced them, in a parameter of an operation."""
    if isinstance(value, ClosedJaxpr):
        yield value.jaxpr
    elif isinstance(value, Jaxpr):
        yield value
    elif isinstance(value, tuple | list):
        for entry in value:
            yield from _jaxprs_in(entry)
