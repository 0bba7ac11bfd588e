"""One verification: what a target pass takes in, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from amusd.types import TokenSource


@dataclass(frozen=True, slots=True)
class Block:
    """The tokens that one target pass takes in: the last committed one, then candidates."""

    start: int
    """Position of the last committed token, `committed_length - 1`."""
    last_token: int
    candidates: tuple[int, ...]
    """One path, each behind the one before it."""
    alternatives: tuple[int, ...] = ()
    """Further candidates, beside and behind those: the likeliest first, and none before its parent."""
    alternative_parents: tuple[int, ...] = ()
    """The row of `token_ids` that each alternative follows."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Input of the forward pass; without alternatives, the tokens at `[start, start + 1 + len(candidates))`."""
        return (self.last_token, *self.candidates, *self.alternatives)

    @property
    def parents(self) -> tuple[int, ...]:
        """The row that each row but the first follows."""
        return (*range(len(self.candidates)), *self.alternative_parents)

    def next_row(self, row: int, token_id: int | None = None) -> int | None:
        """The row with `token_id` behind `row`, or the likeliest one behind it; None: there is none."""
        token_ids = self.token_ids
        for number, parent in enumerate(self.parents, start=1):
            if parent == row and token_id in (None, token_ids[number]):
                return number
        return None

    def path_along(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Rows, the first one among them, of as many of these tokens as there are candidates for one after another."""
        rows = [0]
        for token_id in token_ids:
            row = self.next_row(rows[-1], token_id)
            if row is None:
                break
            rows.append(row)
        return tuple(rows)

    def sources_along(self, token_ids: Sequence[int], num_accepted: int) -> tuple[TokenSource, ...]:
        """The source of each token that a pass commits; the first `num_accepted` were candidates."""
        sources = [TokenSource.CANDIDATE] * num_accepted + [TokenSource.TARGET] * (len(token_ids) - num_accepted)
        if self.alternatives:
            for place, row in enumerate(self.path_along(token_ids[:num_accepted])[1:]):
                if row > len(self.candidates):
                    sources[place] = TokenSource.ALTERNATIVE
        return tuple(sources)

    def num_accepted_alternatives(self, accepted: Sequence[int]) -> int:
        """How many of the accepted tokens are alternatives."""
        return sum(row > len(self.candidates) for row in self.path_along(accepted)) if self.alternatives else 0

    def judged_along(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """The path whose candidates were judged one after another when these tokens were accepted.

        They and the likeliest ones behind them; without alternatives, all candidates.
        """
        rows = list(self.path_along(token_ids))
        while (row := self.next_row(rows[-1])) is not None:
            rows.append(row)
        return tuple(self.token_ids[row] for row in rows[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class PassOutcome:
    """The outcome of one target pass."""

    num_candidates: int
    """Candidates on the likeliest path."""
    num_judged: int
    """Candidates tested one after another, had each been accepted; a late one included."""
    num_accepted: int
    num_alternatives: int
    num_accepted_alternatives: int
    """Accepted candidates that were alternatives."""
    num_tokens: int
    """Tokens committed."""

    @property
    def num_late_accepted(self) -> int:
        """Candidates accepted that came while the pass was under way: one or none."""
        return int(self.num_accepted > self.num_candidates and not self.num_accepted_alternatives)


class Tracks:
    """The places of the rows of one pass over several paths; filled row by row, parents first.

    Rows of one position stand in different tracks, and no path returns to a lower track. So the rows of a path keep
    their order whatever else is in the pass, on which the last bits of their results depend
    (`amusd/models/numerics.py`).
    """

    def __init__(self, number: int) -> None:
        """`number`: of tracks, at least 1."""
        self._number = number
        self._taken: dict[int, set[int]] = {}

    def place(self, position: int, parent: int = 0) -> int | None:
        """The lowest free track for a row whose parent stands in track `parent`; None if there is none."""
        taken = self._taken.setdefault(position, set())
        for track in range(parent, self._number):
            if track not in taken:
                taken.add(track)
                return track
        return None


def place_rows(parents: Sequence[int], num_tracks: int) -> list[tuple[int, int]]:
    """Depth and track of each row of a pass; the first one stands at depth 0.

    `parents` [rows - 1]: the row before each but the first. Raises `ValueError` if `num_tracks` are not enough, and for
    a row that comes before its parent.
    """
    tracks, places = Tracks(num_tracks), [(0, 0)]
    for row, parent in enumerate(parents, start=1):
        if not 0 <= parent < row:
            raise ValueError(f"row {row} cannot follow row {parent}: parents come first")
        depth = places[parent][0] + 1
        track = tracks.place(depth, places[parent][1])
        if track is None:
            raise ValueError(f"{num_tracks} tracks are not enough for the rows at depth {depth}")
        places.append((depth, track))
    return places
