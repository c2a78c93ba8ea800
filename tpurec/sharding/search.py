"""Search: candidates that do not depend on how fast or large the hardware is, then the best of them that fits.

More bandwidth or more memory must never make a plan slower, so the candidates are the same whatever the speeds and
the memory: small problems are enumerated; for others candidates are made for fixed reference speeds: the chip's
documented ones with a rising price on memory, up to the most compact plan, and one each for faster and slower links. A
faster machine makes every candidate faster and a larger one lets more of them fit, so the minimum cannot rise.

Candidates for the documented speeds are made so that a more compact one is never faster at those speeds; therefore, at
those speeds, the first one that fits is the best, and the more compact ones need not be made.

Large problems use only the documented speeds. Between the first candidate that fits and the one before it some more are
made at prices in between, of which the same holds.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tpurec.sharding.assumptions import Assumptions
from tpurec.sharding.costs import CostModel
from tpurec.sharding.effort import has_many
from tpurec.sharding.exact import best_of_all, is_small
from tpurec.sharding.packing import Packer
from tpurec.sharding.space import Cost, Placement, Space, State
from tpurec.sharding.tables import TableSpec
from tpurec.topology.slices import SliceTopology

_SPEEDS = (
    "hbm_bytes",
    "hbm_bytes_per_second",
    "link_bytes_per_second",
    "hop_seconds",
    "launch_seconds",
    "matmul_flops_per_second",
    "matmul_efficiency",
    "gather_efficiency",
    "stream_efficiency",
    "sparse_core_hertz",
    "tensor_core_hertz",
    "sort_cycles",
    "row_bundles",
    "combine_bundles",
    "optimizer_bundles",
)
_LINK_FACTORS = (1.0, 8.0, 0.125, 64.0, 1 / 64)
_LARGE = 60_000  # tables x ranks
_AFRESH = 300  # tables x ranks up to which each reference is searched from several starts of its own
_BYTE_PRICES = tuple(10.0 ** (step / 3) for step in range(-6, 10))  # seconds for all bytes, in units of the step
_COMPACT = 1.02  # a placement this close to the most compact one needs no more compact ones
_STEPS_BETWEEN = 5  # prices to try between the first candidate of a large problem that fits and the one before it
_TIE_PRICE = 1e-5


@dataclass(frozen=True)
class Found:
    """What the search found.

    Args:
        placement: the best that fits; if none fits, the most compact one.
        cost: of that placement.
        fits: whether it fits.
        optimal: whether every other placement was ruled out by costing it.
        stopped_early: whether time ran out.
    """

    placement: Placement
    cost: Cost
    fits: bool
    optimal: bool
    stopped_early: bool


def search(space: Space, tables: Sequence[TableSpec], slice_: SliceTopology, given: Assumptions, clock: Clock) -> Found:
    """Find a fast placement that fits.

    Args:
        space: the problem at the actual speeds.
        tables: all tables.
        slice_: the slice.
        given: the caller's assumptions, None where the slice decides.
        clock: ends the search.

    Returns:
        The best candidate.
    """
    capacity = space.model.capacity_bytes
    if is_small(space):
        placement = best_of_all(space, capacity)
        if placement is not None:
            return Found(placement, space.cost(placement), True, True, False)
    documented = _documented(given, slice_)
    compact = _compact(_at(space, tables, slice_, documented), clock)
    cost = space.cost(compact)
    best = Found(compact, cost, cost.bytes <= capacity, False, False)
    if not best.fits:  # the rule for what fits, whatever the speeds
        return dataclasses.replace(best, stopped_early=clock.over)
    cheaper: _Candidate | None = None  # the last one at a lower price than the latest
    latest: _Candidate | None = None
    for candidate in _candidates(space, tables, slice_, documented, clock):
        best = _better(best, space, candidate.placement)
        if latest is not None and candidate.price > latest.price:
            cheaper = latest
        if candidate.finer and cheaper and latest and space.cost(candidate.placement).bytes <= capacity:
            for placement in _between(space, cheaper, latest, candidate, clock):
                best = _better(best, space, placement)
                if space.cost(placement).bytes <= capacity:
                    break
        if clock.over:
            break
        latest = candidate
    return dataclasses.replace(best, stopped_early=clock.over)


def _better(best: Found, space: Space, placement: Placement) -> Found:
    cost = space.cost(placement)
    fits = cost.bytes <= space.model.capacity_bytes
    if fits and (cost.seconds, cost.bytes) < (best.cost.seconds, best.cost.bytes):
        return Found(placement, cost, fits, False, False)
    return best


@dataclass(frozen=True)
class _Candidate:
    """A placement of a chain.

    Args:
        placement: the placement.
        price: of all bytes, in units of the step, at which it was made; 0 for the first.
        finer: whether, once this one fits, prices between its own and that before it are tried.
    """

    placement: Placement
    price: float
    finer: bool


class Clock:
    """Ends a search, and hears how far it is.

    Args:
        seconds: from now on; None to search to the end.
        tell: told now and then, in words, how far the search is.
    """

    def __init__(self, seconds: float | None, tell: Callable[[str], None] | None = None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds
        self.tell = tell or (lambda words: None)
        self.over = False

    def __call__(self) -> bool:
        """Whether time is over."""
        self.over = self.over or (self._end is not None and time.monotonic() > self._end)
        return self.over


def _candidates(
    space: Space, tables: Sequence[TableSpec], slice_: SliceTopology, documented: Assumptions, clock: Clock
) -> Iterator[_Candidate]:
    large = has_many(space) or len(tables) * slice_.num_ranks > _LARGE
    afresh = len(tables) * slice_.num_ranks <= _AFRESH
    start: Placement | None = None
    for factor in _LINK_FACTORS[: 1 if large else None]:
        speeds = dataclasses.replace(documented, link_bytes_per_second=documented.link_bytes_per_second * factor)
        reference = _at(space, tables, slice_, speeds)
        exactly = reference is space
        for price, placement in _chain(reference, None if afresh else start, clock):
            start = start or placement
            yield _Candidate(placement, price, large and exactly)
            # At these speeds more compact ones are no faster; at other links' one candidate each is variety enough.
            if factor != 1 or (exactly and space.cost(placement).bytes <= space.model.capacity_bytes):
                break


def _at(space: Space, tables: Sequence[TableSpec], slice_: SliceTopology, speeds: Assumptions) -> Space:
    """The problem at other speeds; itself where only the memory differs, which the candidates do not see."""
    if space.model.assume == dataclasses.replace(speeds, **_memory(space.model.assume)):
        return space
    return Space(tables, CostModel(slice_, space.model.batch_size, speeds))


def _memory(assume: Assumptions) -> dict[str, object]:
    return {name: getattr(assume, name) for name in ("hbm_bytes",)}


def _chain(space: Space, start: Placement | None, clock: Clock) -> Iterator[tuple[float, Placement]]:
    """The fastest placement found for a space, then ever more compact ones, none faster than those before.

    Each comes with the price of all bytes at which it was made.
    """
    packer = Packer(space, _scale(space) * _TIE_PRICE, clock, clock.tell)
    favoured = packer.favoured() if has_many(space) else []
    if favoured:
        state = packer.search_many(favoured)
    else:
        state = packer.search() if start is None else packer.improve(State.of(space, start))
    first = state.placement()
    yield 0.0, first
    smallest = space.cost(_compact(space, clock)).bytes
    made, slowest = {first}, space.cost(first).seconds
    for price in _BYTE_PRICES:
        if space.cost(state.placement()).bytes <= smallest * _COMPACT:
            break
        packer = Packer(space, _scale(space) * price, clock, clock.tell)
        near = packer.improve(State.of(space, state.placement()))
        found = [near]
        if favoured and near.placement() != state.placement() and len(space.items) * space.model.num_ranks <= _LARGE:
            found.append(packer.search_many(favoured))
        for other in sorted(found, key=lambda other: other.cost().seconds):
            placement, seconds = other.placement(), space.cost(other.placement()).seconds
            if placement not in made and seconds >= slowest:
                made.add(placement)
                slowest = seconds
                yield price, placement
        state = min(found, key=packer.value)


def _between(
    space: Space, cheaper: _Candidate, latest: _Candidate, last: _Candidate, clock: Clock
) -> Iterator[Placement]:
    """Placements at prices between those of two candidates, none faster than the latest before the last."""
    state, slowest = State.of(space, cheaper.placement), space.cost(latest.placement).seconds
    for price in np.geomspace(max(cheaper.price, _BYTE_PRICES[0] / 2), last.price, _STEPS_BETWEEN + 2)[1:-1]:
        if clock():
            break
        state = Packer(space, _scale(space) * float(price), clock).improve(state)
        seconds = space.cost(state.placement()).seconds
        if seconds >= slowest:
            slowest = seconds
            yield state.placement()


def _scale(space: Space) -> float:
    """Seconds a byte at which all bytes cost about as much as the step."""
    return space.constant_seconds / (space.constant_bytes + 1.0)


def _compact(space: Space, clock: Clock) -> Placement:
    """The placement with the least memory found; time only breaks ties."""
    packer = Packer(space, 1.0, clock)
    return packer.improve(packer.construct(packer.picks(0.0)), powers=()).placement()


def _documented(given: Assumptions, slice_: SliceTopology) -> Assumptions:
    """The caller's assumptions with the slice's own speeds and memory."""
    defaults = Assumptions()
    return dataclasses.replace(given, **{name: getattr(defaults, name) for name in _SPEEDS}).on(slice_)
