"""Side by side: where the rows of a pass over several paths stand. Standard library only.

Rows of one position stand in different tracks, and no path goes back to a lower track. So the rows of a path keep their
order whatever else is in the pass, on which the last bits of their results depend (`amusd/models/numerics.py`).
"""

from __future__ import annotations

from collections.abc import Sequence


class Tracks:
    """Of one pass; filled row by row, parents first."""

    def __init__(self, number: int) -> None:
        """`number`: of tracks, at least 1."""
        self._number = number
        self._taken: dict[int, set[int]] = {}

    def place(self, position: int, parent: int = 0) -> int | None:
        """The track of a row whose parent stands in track `parent`: the lowest free one. None: there is none."""
        taken = self._taken.setdefault(position, set())
        for track in range(parent, self._number):
            if track not in taken:
                taken.add(track)
                return track
        return None


def place_rows(parents: Sequence[int], num_tracks: int) -> list[tuple[int, int]]:
    """Depth and track of each row of a pass; the first one stands at depth 0.

    `parents` [rows - 1]: the row before each but the first. Raises `ValueError` where `num_tracks` do not suffice, and
    for a row that comes before its parent.
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
