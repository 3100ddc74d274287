"""Where tiles are cut along their keys, and the order in which their pieces are taken.

Tiles that are small against an equal share of the work are never cut ("whole"): dealt longest first, they come out
even by themselves.  The others, above all requests that fit one tile (decode, verify: bound by memory), are laid end to
end and cut into stretches of equal cost, so that few are cut and all stretches end together; pieces stand in the order
in which the stretches reach them, which is the order in which CTAs that take tickets become idle.  Equal stretches take
the place of the chunk limit and heap of algorithm 1 in arXiv 2501.01005; tests compare the two.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from attncc.runtime.plan import Shape

STARTUP = 1  # cost of starting a piece (q, the first loads, the result), in blocks of keys
WHOLE = 4  # a tile of a longer request is whole where this many cost no more than an equal share of all work
EDGE = 2  # a cut this many blocks or fewer from an end of a tile moves to the end
STRETCH = 3  # least cost of a stretch
EVEN = 0.96  # share of CTAs that the last round of stretches should occupy
ROUNDS = 8
L2_BYTES = 16 << 20  # K and V that CTAs working at the same time may share: a third of the cache
# of a cut, tile << 32 | block; numpy takes an array without dimensions in half the time that an int takes
NEAREST, AT_BEGIN, AT_END = np.array(0.5 - STARTUP), np.array(EDGE), np.array(STARTUP + EDGE)
BLOCK, TILE = np.array((1 << 32) - 1), np.array(32)
MOST_PIECES, LEAST_KEYS = 16, 2048  # batch_invariant: pieces of a request, at most; keys of a piece, at least


class Tiles(NamedTuple):
    """int64 arrays, one element a tile; tiles of a request are neighbours."""

    rows: np.ndarray  # packed rows
    begin: np.ndarray  # keys [begin, end) that it reads: begin in whole blocks
    end: np.ndarray
    siblings: np.ndarray | None  # tiles of its request; None: one, everywhere
    keys: np.ndarray  # of its request, visible or not
    request: np.ndarray


class Pieces(NamedTuple):
    """One element a piece, in the order of tiles and keys."""

    tile: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    start: np.ndarray  # when it is due, as a share of the whole run; of whole tiles' pieces undefined
    whole: np.ndarray | None  # bool; None: no piece is
    onward: np.ndarray  # the pieces, by number, that go on with the tile of the piece before


def cost(begin: np.ndarray, end: np.ndarray, tile_kv: int) -> np.ndarray:
    """Cost of pieces, in blocks: a block takes what its K and V take to arrive, or its products on 128 rows to be
    made, and on a H200 these take about the same; fewer rows make it no cheaper.  Pieces without keys cost nothing, so
    that they move no cut of the others."""
    size = end - begin
    costs = (size + np.array(tile_kv - 1 + STARTUP * tile_kv)) // np.array(tile_kv)
    if np.count_nonzero(size) < len(size):
        costs[size == 0] = 0
    return costs


@lru_cache
def even_units(sm_count: int, num_kv_heads: int) -> int:
    """Stretches that, times the kv heads, deal evenly over the CTAs in the fewest rounds."""
    best, chosen = 0.0, 1
    for rounds in range(1, ROUNDS + 1):
        units = max(1, sm_count * rounds // num_kv_heads)
        tickets = units * num_kv_heads
        even = tickets / (sm_count * -(-tickets // sm_count))
        if even > best + 1e-9:
            best, chosen = even, units
        if best >= EVEN:
            break
    return chosen


def most_units(sm_count: int, num_kv_heads: int) -> int:
    """Stretches of any plan, at most."""
    return even_units(sm_count, num_kv_heads)


def divide(shape: Shape, tiles: Tiles, coarser: int = 1) -> Pieces:
    """The pieces of the tiles; with `coarser` n, of n times fewer stretches."""
    if shape.batch_invariant:
        return _divide_alone(shape, tiles)
    costs = cost(tiles.begin, tiles.end, shape.tile_kv)
    last = np.add.accumulate(costs)
    work = last.item(-1) if len(last) else 0
    units = min(even_units(shape.sm_count, shape.num_kv_heads), work // STRETCH)
    if tiles.siblings is not None:
        share = work * shape.num_kv_heads / shape.sm_count
        whole = (tiles.siblings > 1) & (costs * WHOLE <= share) & (costs > 0)
        if np.count_nonzero(whole):
            loose = np.flatnonzero(~whole)
            last = costs[loose].cumsum()
            work = int(last[-1]) if len(last) else 0
            # finer than this evens nothing
            units = min(units, work // STRETCH, int(np.ceil(WHOLE * work / share)))
            return _stretches(shape, tiles, costs, last, units // coarser, loose)
    return _stretches(shape, tiles, costs, last, units // coarser)


def _stretches(
    shape: Shape, tiles: Tiles, costs: np.ndarray, last: np.ndarray, units: int, loose: np.ndarray | None = None
) -> Pieces:  # fmt: skip
    """The `loose` tiles (None: all) cut into `units` stretches of equal cost, the others whole.  `last`: the sums of
    the costs of loose tiles."""
    line = costs if loose is None else costs[loose]
    before = last - line  # where on the line a tile begins, its blocks STARTUP later
    length = last.item(-1) / max(1, units) if len(last) else 0.0
    cuts, blocks = _cuts(line, last, before, units, length)
    if loose is not None:
        spread = np.zeros(len(costs), np.int64)
        spread[loose] = before
        before = spread
        reach = np.append(loose, len(costs))  # a cut may be the end of the line
        cuts = (reach[cuts >> TILE] << TILE) + blocks
    tile = np.arange(len(costs))
    key = tile << TILE  # pieces, as tile << 32 | first block
    inside = cuts[blocks.nonzero()[0]]
    begin, end, at, onward = tiles.begin, tiles.end, before, inside
    if len(inside):
        key = np.concatenate((key, inside))
        key.sort()
        tile, block = key >> TILE, key & BLOCK
        onward = block.nonzero()[0]
        begin, end, at = begin[tile] + block * np.array(shape.tile_kv), end[tile], at[tile] + block
        end[onward - 1] = begin[onward]
    whole = None
    if loose is None:
        start = _since(at, key, cuts)
    else:
        whole = np.ones(len(costs), bool)
        whole[loose] = False
        whole = whole[tile]
        mine = np.flatnonzero(~whole)
        start = np.zeros(len(key), np.int64)
        start[mine] = _since(at[mine], key[mine], cuts)
    return Pieces(tile, begin, end, start / np.array(max(1.0, length)), whole, onward)


def _since(at: np.ndarray, key: np.ndarray, cuts: np.ndarray) -> np.ndarray:
    """How far pieces that lie at `at`, ascending from 0, are from the beginning of their stretch."""
    if not len(at):
        return at
    begun = np.zeros(len(at) + 1, np.int64)
    first = key.searchsorted(cuts)  # the first piece of a stretch; the last one may have none
    begun[first] = at.take(first, mode="clip")
    return at - np.maximum.accumulate(begun)[:-1]


def _cuts(
    costs: np.ndarray, last: np.ndarray, before: np.ndarray, units: int, length: float
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """(cuts that leave `units` stretches of equal cost, as tile << 32 | block of the tile, ascending; the blocks).
    Cuts at the beginning of a tile may stand there more than once."""
    if units <= 1:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    want = np.arange(1.0, units) * np.array(length)
    tile = last.searchsorted(want, side="right")
    block = (want - before[tile] + NEAREST).astype(np.int64)
    over = block > costs[tile] - AT_END
    block *= (block >= AT_BEGIN) > over
    return ((tile + over) << TILE) + block, block


def _divide_alone(shape: Shape, tiles: Tiles) -> Pieces:
    """Every tile cut by its own length and its request's number of tiles: a request is cut alike in any batch."""
    size = tiles.end - tiles.begin
    siblings = np.ones_like(size) if tiles.siblings is None else tiles.siblings
    chunk = -(-size // np.maximum(1, MOST_PIECES // siblings))
    chunk = np.maximum(-(-chunk // shape.tile_kv) * shape.tile_kv, LEAST_KEYS // shape.tile_kv * shape.tile_kv)
    count = np.maximum(1, -(-size // chunk))
    tile = np.arange(len(size)).repeat(count)
    within = np.arange(len(tile)) - (count.cumsum() - count)[tile]
    begin = tiles.begin[tile] + within * chunk[tile]
    end = np.minimum(begin + chunk[tile], tiles.end[tile])
    whole = siblings[tile] > 1
    costs = np.where(whole, 0, cost(begin, end, shape.tile_kv))
    order = np.argsort(-costs, kind="stable")  # longest first
    done = costs[order].cumsum()
    start = np.empty(len(tile))
    start[order] = (done - costs[order]) / max(1, done[-1] if len(done) else 1)
    return Pieces(tile, begin, end, start, whole if whole.any() else None, within.nonzero()[0])


def tickets(shape: Shape, tiles: Tiles, pieces: Pieces) -> tuple[np.ndarray, np.ndarray | None, int]:
    """(piece of every record in the order of tickets, first kv head of each or None for 0, kv heads a record).

    Whole tiles go request by request and, within one, section by section of kv heads, so that CTAs find in L2 what
    others read.  A causal mask makes the last tiles the longest: these go first, the shortest of all last.  Pieces of
    the others lie among them, spread over the whole run: they wait for memory while the whole ones compute.
    """
    heads = shape.num_kv_heads
    if pieces.whole is None:
        return pieces.start.argsort(kind="stable"), None, heads
    whole = np.flatnonzero(pieces.whole)
    lanes = _lanes(shape, int(tiles.keys[pieces.tile[whole]].max()))
    sections = heads // lanes
    costs = cost(pieces.begin[whole], pieces.end[whole], shape.tile_kv)
    place = np.tile(_rank(tiles.request[pieces.tile[whole]], costs) * sections, sections)
    section = np.arange(sections).repeat(len(whole))
    far = int(costs.max()) + 1
    order = np.argsort((place + section) * far - np.tile(costs, sections), kind="stable")
    piece, section = np.tile(whole, sections)[order], section[order]
    if len(whole) < len(pieces.tile):
        done = np.tile(costs, sections)[order].cumsum()
        loose = np.flatnonzero(~pieces.whole)
        start = np.concatenate((done / max(1, done[-1]), pieces.start[loose].repeat(sections)))
        order = np.argsort(start, kind="stable")
        piece = np.concatenate((piece, loose.repeat(sections)))[order]
        section = np.concatenate((section, np.tile(np.arange(sections), len(loose))))[order]
    return piece, section * lanes, lanes


def _rank(request: np.ndarray, costs: np.ndarray) -> np.ndarray:
    """The place of each piece's request among all, those with the longest piece first.  `request` is ascending."""
    first = np.flatnonzero(np.append(True, request[1:] != request[:-1]))
    order = np.argsort(-np.maximum.reduceat(costs, first), kind="stable")
    rank = np.empty(len(first), np.int64)
    rank[order] = np.arange(len(first))
    return rank.repeat(np.diff(np.append(first, len(request))))


def _lanes(shape: Shape, keys: int) -> int:
    """The most kv heads, dividing all evenly, whose K and V of so many keys CTAs can share in L2."""
    fit = max(1, L2_BYTES // max(1, keys * shape.kv_bytes))
    return max(n for n in range(1, shape.num_kv_heads + 1) if shape.num_kv_heads % n == 0 and n <= fit)
