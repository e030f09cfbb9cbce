"""``fewest-moves``: keep what may stay, and be as even as vLLM's own policy on the same load.

For each layer vLLM's own answer sets the mark: the load of its busiest rank. The present placement is then changed one
step at a time, where the excess over the mark falls most for each expert that moves, until no rank exceeds it. At last
every change that turned out not to be needed is undone. This is tried with several ratings of a step while there is
time, and what moves fewest is taken. If none leads to the mark, it is vLLM's own placement, with its ranks renamed so
that they hold as many of its experts as possible already.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from itertools import combinations
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np

from vllm_graft.contracts import ExpertBalancer, ExpertLoad, OptionError, OptionValue

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vllm_graft.contracts.balancing import Loads, Placement

_ROUNDING: Final = 1e-9
"""The share of the mark that sums of floats may be off by."""

_MANY: Final = 0.25
"""The share of slots above which renaming ranks may move fewer experts than a repair."""

_WIDEST_UNDO: Final = 64
"""The changed slots up to which pairs of them are tried to be undone."""

Score = Callable[["Loads", "Loads"], "Loads"]
"""Rates steps by the excess that each leaves out and by the experts that each moves; the highest is taken."""


class FewestMoves(ExpertBalancer):
    """Moves as few experts as it can find to be as even as vLLM's own policy, which starts anew each time.

    ``tolerance`` is how much more than with vLLM's own placement the busiest rank of a layer may have, as a share.
    ``seconds`` is how long a rearrangement may search; layers that are left then get vLLM's own placement.
    """

    options: ClassVar[Mapping[str, OptionValue]] = {"tolerance": 0.02, "seconds": 1.5}

    @classmethod
    def check_options(cls, options: Mapping[str, OptionValue]) -> None:
        """Refuse a tolerance that is none, and a search that has no time."""
        tolerance, seconds = options["tolerance"], options["seconds"]
        if not isinstance(tolerance, int | float) or not 0 <= tolerance <= 1:
            raise OptionError(f"must be from 0 to 1, but is {tolerance!r}", option="tolerance")
        if not isinstance(seconds, int | float) or not 0 < seconds <= 60:
            raise OptionError(f"must be above 0 and at most 60, but is {seconds!r}", option="seconds")

    def place(self, experts: ExpertLoad) -> Placement:
        """Return the present placement, changed where a rank has more than its mark."""
        stock = experts.stock()
        marks = experts.rank_loads(stock).max(axis=1) * (1 + float(self.option("tolerance")))  # type: ignore[arg-type]
        busiest = experts.rank_loads(experts.placement).max(axis=1)
        placement = experts.placement.copy()
        uneven = np.flatnonzero(busiest > marks * (1 + _ROUNDING))
        seconds, started = float(self.option("seconds")), time.monotonic()  # type: ignore[arg-type]
        for number, layer in enumerate(uneven):
            if time.monotonic() >= started + seconds:
                placement[layer] = stock[layer]
                continue
            # Its even share of the time, and what the layers before it left.
            until = started + seconds * (number + 1) / len(uneven)
            placement[layer] = _rearrange(experts, layer, stock[layer], float(marks[layer]), until)
        return placement


def _rearrange(experts: ExpertLoad, layer: int, stock: Placement, mark: float, until: float) -> Placement:
    """Return the placement of one layer that moves the fewest experts, of those that are found."""
    before = _pairs(experts.placement[layer], experts)

    def moves(row: Placement) -> int:
        return int(np.count_nonzero(_pairs(row, experts) & ~before))

    best = stock
    allowed = allowed_ranks(experts, layer)
    if allowed is not None:
        for number, score in enumerate(RATINGS):
            if number and time.monotonic() >= until:
                break
            repaired = LayerRepair(experts, layer, mark, allowed).run(score)
            if repaired is not None:
                best = min(best, repaired, key=moves)
    if moves(best) > experts.slots * _MANY:
        renamed = keep_slots(experts.placement[layer], rename_ranks(experts, layer, stock), experts.ranks)
        best = min(best, renamed, key=moves)
    return best


def _pairs(row: Placement, experts: ExpertLoad) -> NDArray[np.bool_]:
    held = np.zeros((experts.ranks, experts.experts), dtype=bool)
    np.put_along_axis(held, row.reshape(experts.ranks, -1), True, axis=1)
    return held


def _by_move(gain: Loads, cost: Loads) -> Loads:
    # A copy within a rank is nearly free.
    return gain / np.maximum(cost, 0.05)


def _by_step(gain: Loads, cost: Loads) -> Loads:
    # Ties go to the step that moves fewer.
    return gain * (1 - 1e-6 * cost)


def _cheapest(gain: Loads, cost: Loads) -> Loads:
    return gain * 1e-3 ** np.maximum(cost, 0.0)


RATINGS: Final[tuple[Score, ...]] = (_by_move, _by_step, _cheapest)
"""Each finds placements that the others miss."""


def allowed_ranks(experts: ExpertLoad, layer: int) -> NDArray[np.bool_] | None:
    """Return which ranks an expert may sit on, as ``[expert, rank]``; None if one is elsewhere already.

    With groups that can be dealt out to the nodes, vLLM keeps each group on one node, and so does this.
    """
    free = np.ones((experts.experts, experts.ranks), dtype=bool)
    if experts.nodes == 1 or experts.groups % experts.nodes:
        return free
    nodes = _pairs(experts.placement[layer], experts).reshape(experts.nodes, -1, experts.experts).any(axis=1)
    groups = nodes.reshape(experts.nodes, experts.groups, -1).any(axis=2)
    if (groups.sum(axis=0) != 1).any():
        return None
    home = np.repeat(groups.argmax(axis=0), experts.experts // experts.groups)
    node_of_rank = np.repeat(np.arange(experts.nodes), experts.ranks // experts.nodes)
    allowed: NDArray[np.bool_] = home[:, None] == node_of_rank[None, :]
    return allowed


class LayerRepair:
    """Changes the placement of one layer step by step until no rank has more than the mark."""

    def __init__(self, experts: ExpertLoad, layer: int, mark: float, allowed: NDArray[np.bool_]) -> None:
        self.load, self.ranks, self.mark = experts.load[layer], experts.ranks, mark * (1 + _ROUNDING)
        self.allowed = allowed
        self.before = experts.placement[layer].reshape(experts.ranks, -1)
        self.slots: Placement = self.before.copy()
        self.held_before = _pairs(experts.placement[layer], experts)
        self._count()

    def run(self, score: Score) -> Placement | None:
        """Return the repaired placement; None if no step leads further before the mark is met."""
        for _ in range(2 * self.slots.size):
            if self.loads.max() <= self.mark:
                self._undo()
                return self.slots.reshape(-1)
            step = self._best_step(score)
            if step is None:
                return None
            self._set(step)
        return None

    def _count(self) -> None:
        """Count the copies of each expert, on each rank and in all, and the load that follows."""
        self.held = np.zeros((self.ranks, len(self.load)), dtype=np.int64)
        np.add.at(self.held, (np.arange(self.ranks)[:, None], self.slots), 1)
        self.copies = self.held.sum(axis=0)
        self.share = self.load / self.copies
        self.loads: Loads = self.held @ self.share
        # What another expert on a rank adds to the moves, and what one that leaves takes from them.
        self.comes = ((self.held == 0) & ~self.held_before).astype(float)
        self.goes = ((self.held == 1) & ~self.held_before).astype(float)

    def _set(self, step: Iterable[tuple[int, int, int]]) -> None:
        for rank, slot, expert in step:
            self.slots[rank, slot] = expert
        self._count()

    def _excess(self, loads: Loads) -> Loads:
        over: Loads = np.maximum(loads - self.mark, 0.0)
        return over

    def _best_step(self, score: Score) -> list[tuple[int, int, int]] | None:
        """Return the step with the best score, as slots and their new experts; None if none lowers the excess."""
        hot = int(self.loads.argmax())
        best, chosen = 0.0, None
        for gains, costs, step in (self._swaps(hot), self._copies_of(hot), self._drops(hot)):
            if gains.size == 0:
                continue
            rated = np.where(gains > self.mark * _ROUNDING, score(gains, costs), 0.0)
            index = int(rated.argmax())
            if rated.flat[index] > best:
                best, chosen = float(rated.flat[index]), step(index)
        return chosen

    def _swaps(self, hot: int) -> tuple[Loads, Loads, Callable[[int], list[tuple[int, int, int]]]]:
        """Rate every exchange of an expert of the hottest rank with one of another rank."""
        mine, theirs = self.slots[hot], self.slots.reshape(-1)
        rank_of = np.repeat(np.arange(self.ranks), self.slots.shape[1])
        less = self.share[mine][:, None] - self.share[theirs][None, :]
        gains = self._excess(self.loads[hot]) + self._excess(self.loads[rank_of])[None, :]
        gains = gains - self._excess(self.loads[hot] - less) - self._excess(self.loads[rank_of][None, :] + less)
        fits = (less > 0) & (rank_of != hot)[None, :]
        fits &= self.allowed[mine][:, rank_of] & self.allowed[theirs, hot][None, :]
        costs = (self.comes[rank_of][:, mine].T - self.goes[hot, mine][:, None]) + (
            self.comes[hot, theirs] - self.goes[rank_of, theirs]
        )[None, :]

        def step(index: int) -> list[tuple[int, int, int]]:
            mine_at, theirs_at = np.unravel_index(index, less.shape)
            rank, slot = divmod(int(theirs_at), self.slots.shape[1])
            return [(hot, int(mine_at), int(theirs[theirs_at])), (rank, slot, int(mine[mine_at]))]

        return np.where(fits, gains, 0.0), costs, step

    def _copies_of(self, hot: int) -> tuple[Loads, Loads, Callable[[int], list[tuple[int, int, int]]]]:
        """Rate a further copy of an expert of the hottest rank, in a slot of another rank with a copy to spare."""
        spare = np.argwhere((self.copies[self.slots] > 1) & (np.arange(self.ranks) != hot)[:, None])
        return self._replacements(spare, np.unique(self.slots[hot]))

    def _drops(self, hot: int) -> tuple[Loads, Loads, Callable[[int], list[tuple[int, int, int]]]]:
        """Rate every other expert in a slot of the hottest rank with a copy to spare."""
        spare = np.argwhere((self.copies[self.slots] > 1) & (np.arange(self.ranks) == hot)[:, None])
        return self._replacements(spare, np.arange(len(self.load)))

    def _replacements(
        self, spare: Placement, incoming: Placement
    ) -> tuple[Loads, Loads, Callable[[int], list[tuple[int, int, int]]]]:
        ranks, out = spare[:, 0], self.slots[spare[:, 0], spare[:, 1]]
        grown = self.load[out] / np.maximum(self.copies[out] - 1, 1)
        shrunk = self.load[incoming] / (self.copies[incoming] + 1)
        # As [slot, expert that comes, rank].
        loads = self.loads + (self.held[:, out] * (grown - self.share[out])).T[:, None, :]
        loads = loads + (self.held[:, incoming] * (shrunk - self.share[incoming])).T[None, :, :]
        each = np.arange(len(spare))
        loads[each, :, ranks] += shrunk[None, :] - grown[:, None]
        gains = self._excess(self.loads).sum() - self._excess(loads).sum(axis=2)
        fits = (out[:, None] != incoming[None, :]) & self.allowed[incoming][:, ranks].T
        costs = self.comes[ranks][:, incoming] - self.goes[ranks, out][:, None]

        def step(index: int) -> list[tuple[int, int, int]]:
            slot, expert = np.unravel_index(index, gains.shape)
            return [(int(spare[slot, 0]), int(spare[slot, 1]), int(incoming[expert]))]

        return np.where(fits, gains, 0.0), costs, step

    def _undo(self) -> None:
        """Undo changes, one by one and in pairs, while no rank exceeds the mark."""
        changed = [(int(rank), int(slot)) for rank, slot in np.argwhere(self.slots != self.before)]
        sizes = (1, 2) if len(changed) <= _WIDEST_UNDO else (1,)
        for size in sizes:
            for places in combinations(changed, size):
                now = [(rank, slot, int(self.slots[rank, slot])) for rank, slot in places]
                back = [(rank, slot, int(self.before[rank, slot])) for rank, slot in places]
                if all(one == other for one, other in zip(now, back, strict=True)):
                    continue
                self.slots[tuple(zip(*places, strict=True))] = [expert for _, _, expert in back]
                copies = np.bincount(self.slots.reshape(-1), minlength=len(self.load))
                share = self.load / np.maximum(copies, 1)
                if copies.min() == 0 or share[self.slots].sum(axis=1).max() > self.mark:
                    self.slots[tuple(zip(*places, strict=True))] = [expert for _, _, expert in now]
        self._count()


def rename_ranks(experts: ExpertLoad, layer: int, stock: Placement) -> Placement:
    """Return vLLM's placement of a layer with its ranks renamed, so that they hold as much as possible already.

    Nodes are renamed as a whole, then the ranks of each: groups of experts stay together.
    """
    new, old = _pairs(stock, experts), _pairs(experts.placement[layer], experts)
    rows = stock.reshape(experts.ranks, -1)
    common: Loads = old.astype(float) @ new.T.astype(float)
    together = experts.nodes > 1 and experts.groups % experts.nodes == 0
    blocks = experts.nodes if together else 1
    size = experts.ranks // blocks
    within = [
        [best_names(common[a * size : (a + 1) * size, b * size : (b + 1) * size]) for b in range(blocks)]
        for a in range(blocks)
    ]
    kept = np.array(
        [
            [common[np.arange(a * size, (a + 1) * size), b * size + within[a][b]].sum() for b in range(blocks)]
            for a in range(blocks)
        ]
    )
    names = best_names(kept)
    order = np.concatenate([names[a] * size + within[a][names[a]] for a in range(blocks)])
    return rows[order].reshape(-1)


def best_names(common: Loads) -> Placement:
    """Return for each row the column that is its own, so that the sum over all rows is as large as possible.

    The assignment problem, by shortest augmenting paths with potentials: exact, and cubic in the rows.
    """
    count = len(common)
    cost = np.zeros((count + 1, count + 1))
    cost[1:, 1:] = common.max(initial=0.0) - common
    row_price, column_price = np.zeros(count + 1), np.zeros(count + 1)
    owner = np.zeros(count + 1, dtype=np.int64)
    for row in range(1, count + 1):
        owner[0], column = row, 0
        reach, came = np.full(count + 1, np.inf), np.zeros(count + 1, dtype=np.int64)
        done = np.zeros(count + 1, dtype=bool)
        while owner[column]:
            done[column] = True
            here = owner[column]
            reduced = cost[here] - row_price[here] - column_price
            closer = ~done & (reduced < reach)
            closer[0] = False
            reach[closer], came[closer] = reduced[closer], column
            open_columns = np.where(done, np.inf, reach)
            open_columns[0] = np.inf
            nearest = int(open_columns.argmin())
            step = open_columns[nearest]
            row_price[owner[done]] += step
            column_price[done] -= step
            reach[~done] -= step
            column = nearest
        while column:
            owner[column], column = owner[came[column]], int(came[column])
    names = np.empty(count, dtype=np.int64)
    names[owner[1:] - 1] = np.arange(count)
    return names


def keep_slots(before: Placement, after: Placement, ranks: int) -> Placement:
    """Return a placement with the same experts on each rank, where those that stay keep their slots."""
    old, new = before.reshape(ranks, -1), after.reshape(ranks, -1)
    kept = np.empty_like(new)
    for rank in range(ranks):
        coming, empty = list(new[rank]), []
        for slot, expert in enumerate(old[rank]):
            if expert in coming:
                coming.remove(expert)
                kept[rank, slot] = expert
            else:
                empty.append(slot)
        kept[rank, empty] = coming
    return kept.reshape(-1)
