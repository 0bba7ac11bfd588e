"""One verification: the rows of a target pass, and its outcome."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from amusd.types import TokenSource


@dataclass(frozen=True, slots=True)
class Block:
    """The tokens of one target pass: the last committed one, then candidates."""

    start: int
    last_token: int
    candidates: tuple[int, ...]
    alternatives: tuple[int, ...] = ()
    """Candidates on other paths, likeliest first, parents before children."""
    alternative_parents: tuple[int, ...] = ()
    draft_probs: tuple[Any, ...] = ()
    """The distribution of each of `candidates`, under the ratio test."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Input of the pass; without alternatives, the tokens at `[start, start + 1 + len(candidates))`."""
        return (self.last_token, *self.candidates, *self.alternatives)

    @property
    def parents(self) -> tuple[int, ...]:
        """The row that each row but the first follows."""
        return (*range(len(self.candidates)), *self.alternative_parents)

    def next_row(self, row: int, token_id: int | None = None) -> int | None:
        """The row of `token_id` after `row`, by default the likeliest row; None without one."""
        token_ids = self.token_ids
        for number, parent in enumerate(self.parents, start=1):
            if parent == row and token_id in (None, token_ids[number]):
                return number
        return None

    def path_along(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """The first row and the rows of these tokens, as far as they are candidates."""
        rows = [0]
        for token_id in token_ids:
            row = self.next_row(rows[-1], token_id)
            if row is None:
                break
            rows.append(row)
        return tuple(rows)

    def sources_along(self, token_ids: Sequence[int], num_accepted: int) -> tuple[TokenSource, ...]:
        """Source of each committed token; the first `num_accepted` were candidates."""
        sources: list[TokenSource] = ["candidate"] * num_accepted
        sources += ["target"] * (len(token_ids) - num_accepted)
        if self.alternatives:
            for place, row in enumerate(self.path_along(token_ids[:num_accepted])[1:]):
                if row > len(self.candidates):
                    sources[place] = "alternative"
        return tuple(sources)

    def judged_along(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """The candidates judged when these tokens were accepted: these, and the likeliest ones after them."""
        rows = list(self.path_along(token_ids))
        while (row := self.next_row(rows[-1])) is not None:
            rows.append(row)
        return tuple(self.token_ids[row] for row in rows[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class PassOutcome:
    """The outcome of one target pass."""

    num_candidates: int
    num_judged: int
    """Candidates on the path that was followed, those after a rejected one and a late one included."""
    num_accepted: int
    num_alternatives: int
    num_accepted_alternatives: int
    num_tokens: int

    @property
    def num_late_accepted(self) -> int:
        """Accepted candidates that came during the pass: one or none."""
        return int(self.num_accepted > self.num_candidates and not self.num_accepted_alternatives)


class Tracks:
    """Tracks of the rows of a pass over several paths; filled row by row, parents first.

    Rows of one position have different tracks, and no path returns to a lower track. So the rows of a path keep their
    order, on which their last bits depend (`amusd/models/numerics.py`).
    """

    def __init__(self, num_tracks: int) -> None:
        """`num_tracks`: at least 1."""
        self._num_tracks = num_tracks
        self._taken: dict[int, set[int]] = {}

    def place(self, position: int, parent_track: int) -> int | None:
        """The lowest free track for a row whose parent is in `parent_track`; None without one."""
        taken = self._taken.setdefault(position, set())
        for track in range(parent_track, self._num_tracks):
            if track not in taken:
                taken.add(track)
                return track
        return None


def place_rows(parents: Sequence[int], num_tracks: int) -> list[tuple[int, int]]:
    """Depth and track of each row of a pass; the first has depth 0.

    `parents` [rows - 1]: the parent of each row but the first. Raises `ValueError` for too few tracks, or a row before
    its parent.
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
