"""How long chips exchange data at least, by the bytes that a split has to move.

The links of a chip lead to its neighbours. On these grids, two rows of two or four chips, all chips
lie on one ring, and pieces can go round it both ways. So a collective that sends pieces round, such
as an all-gather, has both links of each chip. A collective-permute goes where its program says: if
that is always onward, as in `attention.ring`, a chip receives over one link. An all-to-all has a
piece for each pair of chips: what half of the chips have for the other half must pass the links
between the two. All of this takes for granted that neighbours of a mesh are neighbours on the grid.
"""

from collections.abc import Iterable

from course.tpu.chips import FLAT, ICI_LINK
from course.tpu.records import Exchange

# Bytes in a second that a link to a neighbour carries each way. Google documents twice as much for
# a v6e chip as for a v5e: docs.cloud.google.com/tpu/docs/v6e.
LINKS = {"v5e": ICI_LINK, "v6e": 2 * ICI_LINK}
GRIDS = FLAT | {2: (1, 2)}  # a part of the chips lies as closely as it can


def received_share(kind: str, chips: int) -> float:
    """Return how many bytes a chip receives for each byte that a collective gives it, on a ring.

    The bytes of a collective are those of its result on one chip, as in `Collective.bytes`. Of an
    all-gather's result a chip has one piece itself. A reduce-scatter gives one piece, for which
    as many pieces as there are other chips went round. An all-reduce is both, one after the other
    (Patarasuk and Yuan, 2009). Of an all-to-all's result a chip has one piece itself.

    Parameters
    ----------
    kind : str
        As XLA calls it, such as ``all-reduce``.
    chips : int
        How many chips take part.

    Examples
    --------
    >>> received_share("all-gather", 8), received_share("all-reduce", 8)
    (0.875, 1.75)
    """
    others = chips - 1
    shares = {
        "all-gather": others / chips,
        "all-reduce": 2 * others / chips,
        "all-to-all": others / chips,
        "collective-permute": 1.0,
        "reduce-scatter": float(others),
    }
    if kind not in shares:
        raise ValueError(
            f"No collective {kind!r} is known here: choose one of {', '.join(shares)}."
        )
    return shares[kind]


def received_bytes(exchanges: Iterable[Exchange], chips: int) -> float:
    """Return how many bytes a chip receives in one step, if chips exchange on a ring.

    ``chips`` is how many they are where an exchange does not say it itself.
    """
    received = 0.0
    for each in exchanges:
        received += received_share(each.kind, each.chips or chips) * each.bytes
    return received


def least_seconds(exchanges: Iterable[Exchange], chip: str, chips: int) -> float:
    """Return the seconds that the links need at least for what one step exchanges.

    Parameters
    ----------
    exchanges : Iterable[Exchange]
        From `Split.exchanges`.
    chip : str
        ``v5e`` or ``v6e``; any chip if there is nothing to exchange.
    chips : int
        How many exchange with one another, where an exchange does not say it itself: 4 or 8, as
        `tpu_devices` places them, or 2 neighbours, between which there is one link.

    Notes
    -----
    A collective-permute goes round the ring as `Exchange.direction` says. Where that is 0, most of
    its pieces go to no neighbour, or nobody wrote it down: they are counted as if each took one
    link, and both ways shared them, which is too little rather than too much.
    """
    seconds = 0.0
    passed_on = {1: 0.0, -1: 0.0}  # bytes of collective-permutes, each way
    for exchange in exchanges:
        number = exchange.chips or chips
        if number == 1:
            continue
        received = received_bytes([exchange], number)
        if exchange.kind == "collective-permute" and number > 2:
            ways = [exchange.direction] if exchange.direction else [1, -1]
            for way in ways:
                passed_on[way] += received / len(ways)
            continue
        by_ring = received / ((1 if number == 2 else 2) * LINKS[chip])
        if exchange.kind == "all-to-all":
            by_ring = max(by_ring, bisection_seconds(exchange.bytes, chip, number))
        seconds += by_ring
    if any(passed_on.values()):
        seconds += max(passed_on.values()) / LINKS[chip]
    return seconds


def bisection_seconds(size: int, chip: str, chips: int) -> float:
    """Return the seconds in which an all-to-all passes the middle of the grid.

    Each chip of one half has a piece for each chip of the other, and pieces pass both ways at once.

    Parameters
    ----------
    size : int
        Bytes of the result on a chip.
    """
    rows = min(GRIDS[chips])  # as many links lead from one half to the other
    crossing = chips / 2 * size / 2
    return crossing / (rows * LINKS[chip])
