"""How long calls take, and how many programs they compile."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class Timing:
    """Seconds that calls took: the first one, which may compile, and each later one."""

    first: float
    later: tuple[float, ...]

    @property
    def steady(self) -> float:
        """Return the median of the later calls, in seconds."""
        return statistics.median(self.later)

    def __str__(self) -> str:
        spread = f"{min(self.later):.3f} to {max(self.later):.3f}"
        return (
            f"first call {self.first:.3f} s, then {self.steady:.3f} s "
            f"(median of {len(self.later)}: {spread} s)"
        )


def time_calls(fn: Callable[..., Any], *args: Any, repeats: int = 3, **kwargs: Any) -> Timing:
    """Time a first call and later ones apart, each until its results are there.

    JAX returns before the devices are done, so every call is timed up to ``jax.block_until_ready``
    of its result.

    Parameters
    ----------
    fn : callable
        Called as ``fn(*args, **kwargs)``, ``1 + repeats`` times. It should return what it computes:
        what it does not return cannot be waited for.
    repeats : int
        How many later calls, 1 or more.

    Returns
    -------
    Timing
        ``first``, ``later`` and their median ``steady``, in seconds.

    Examples
    --------
    >>> timing = time_calls(jax.numpy.sin, 1.0, repeats=2)
    >>> len(timing.later), timing.steady > 0
    (2, True)
    """
    if not callable(fn):
        raise TypeError(
            f"time_calls needs a function, but got {fn!r}: pass fn and its arguments, not its "
            "result."
        )
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}, but a steady state needs at least 1 later call.")
    seconds = []
    for _ in range(1 + repeats):
        start = time.perf_counter()
        jax.block_until_ready(fn(*args, **kwargs))
        seconds.append(time.perf_counter() - start)
    return Timing(seconds[0], tuple(seconds[1:]))


@contextmanager
def count_compilations() -> Iterator[list[str]]:
    """List the names of the programs that JAX compiles inside a ``with`` block.

    Builds on ``jax.monitoring``, where JAX reports each program that it asks the compiler for, also
    one that comes out of the persistent compilation cache. Seconds would depend on the machine; the
    count does not.

    Examples
    --------
    >>> double = jax.jit(lambda x: 2 * x)
    >>> with count_compilations() as compiled:
    ...     _ = double(1.0), double(2.0)
    >>> len(compiled)
    1
    """
    names: list[str] = []
    active = True

    def listen(event: str, duration: float, **details: Any) -> None:
        if active and event == "/jax/core/compile/backend_compile_duration":
            names.append(details.get("fun_name", "unnamed"))

    # There is no public way to unregister in every supported version, so the listener goes quiet
    # instead.
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield names
    finally:
        active = False
