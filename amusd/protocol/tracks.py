"""Side by side: where the rows of a pass over several paths stand. Standard library only.

Rows of one position stand in different tracks, and no path goes back to a lower track. So the rows of a path keep their
order whatever else is in the pass, on which the last bits of their results depend (`amusd/models/numerics.py`).
"""

from __future__ import annotations


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
