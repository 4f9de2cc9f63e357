"""Where the time of a call goes: what JAX's profiler noted, by the parts of a program."""

import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import jax
from matplotlib.axes import Axes

# Operations that contain others, whose time would count twice.
CONTAINERS = ("while", "call", "conditional")


class Event(NamedTuple):
    """One operation, as one thread of the host or one part of a chip ran it."""

    row: str  # the thread, or the part of the chip
    start: float  # in milliseconds, since the first event
    duration: float  # in milliseconds
    origin: str  # where in the Python program it comes from, with the names of ``jax.named_scope``


def profile_call(program: jax.stages.Compiled, *arguments) -> list[Event]:
    """Call a compiled program while JAX's profiler watches, and read what it noted.

    Builds on ``jax.profiler.trace`` and ``jax.profiler.ProfileData``. A profile has planes, for
    chips and for the host; a plane has lines, for threads or for parts of a chip; a line has
    events. An event has the name of an operation in the compiled program, whose text says where the
    operation comes from.

    Parameters
    ----------
    program : jax.stages.Compiled
        From ``jax.jit(…).lower(…).compile()``.
    *arguments
        Its arguments, but for those that are static.

    Returns
    -------
    list of Event
        Sorted by their start; without operations that contain others.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(program(*arguments))
        (file,) = Path(folder).glob("**/*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(file))
    return read_events(profile, origins_of(program))


def origins_of(program: jax.stages.Compiled) -> dict[str, str]:
    """Return where each operation of a compiled program comes from, by its name in the program."""
    return dict(re.findall(r'%?([\w.-]+) = .*op_name="([^"]*)"', program.as_text()))


def read_events(profile: jax.profiler.ProfileData, origins: Mapping[str, str]) -> list[Event]:
    """Read the events of a profile that are operations of a program, see `profile_call`."""
    operations = []
    for plane in profile.planes:
        for line in plane.lines:
            for event in line.events:
                name = str(dict(event.stats).get("hlo_op", event.name))
                operation = re.match(r"%?([\w.-]*)", name)[1]
                if operation in origins and not operation.startswith(CONTAINERS):
                    row = f"{plane.name} {line.name}"
                    operations.append((event.start_ns, row, event.duration_ns, origins[operation]))
    operations.sort()
    return [
        Event(row, (start - operations[0][0]) / 1e6, duration / 1e6, origin)
        for start, row, duration, origin in operations
    ]


def find_part(origin: str, parts: Mapping[str, str]) -> str:
    """Return the part to which an operation belongs.

    ``parts`` has a name for each regular expression; the first one that is found in the origin
    decides. What fits none is among the "others".
    """
    for pattern, name in parts.items():
        if re.search(pattern, origin):
            return name
    return "others"


def time_by_part(events: Iterable[Event], parts: Mapping[str, str]) -> Counter:
    """Return milliseconds for each part, summed over threads; see `find_part`."""
    spent = Counter()
    for event in events:
        spent[find_part(event.origin, parts)] += event.duration
    return spent


def draw_timeline(
    axes: Axes, events: Iterable[Event], parts: Mapping[str, str], start: float, end: float
) -> None:
    """Draw events as XProf does: time to the right, a row for each thread, a colour for each part.

    Only what begins between ``start`` and ``end`` is drawn, in milliseconds, and of the threads the
    three that do most of it.
    """
    shown = [event for event in events if start <= event.start < end]
    busy = Counter()
    for event in shown:
        busy[event.row] += event.duration
    rows = [row for row, _ in busy.most_common(3)]
    spans = defaultdict(list)  # by part and row, where they start and how long they are
    for event in shown:
        spans[find_part(event.origin, parts), event.row].append(
            (event.start - start, event.duration)
        )
    for number, name in enumerate([*dict.fromkeys(parts.values()), "others"]):
        for place, row in enumerate(rows):
            bars = spans[name, row]
            label = name if place == 0 and bars else None
            axes.broken_barh(bars, (place - 0.4, 0.8), color=f"C{number}", label=label)
    axes.set_yticks(range(len(rows)), [f"thread {place + 1}" for place in range(len(rows))])
    axes.set_xlabel("milliseconds")
    axes.legend(ncols=6, loc="lower center", bbox_to_anchor=(0.5, 1), frameon=False)
