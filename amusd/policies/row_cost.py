"""The time that a further row adds to a pass of a model, found from passes themselves.

Rows of one pass share its fixed cost (weights are read once), so the first ones are nearly free; how nearly depends on
model and machine. It is the slope of a straight line through recent passes: time over rows. The steps of a draft have
one line, the passes of a target another.
"""

from __future__ import annotations

MEMORY = 0.98
"""Weight of the past, for each pass."""
DRAFT_ROW_SHARE = 0.06
"""The cost of a further row as a share of a draft step with one row, before steps of different sizes were seen."""
FORGETTING = 0.99
"""Weight of the known cost of a row after each pass that says nothing of it."""
MIN_VARIATION = 8.0
"""The least weighted sum of squared deviations of the number of rows that a line is fitted to."""


class RowCost:
    """A line through recent passes, the past weighing less."""

    def __init__(self, prior_row_share: float = 0.0) -> None:
        """`prior_row_share`: the share assumed until passes of different sizes were seen."""
        self._num = self._rows = self._ns = self._rows_squared = self._rows_ns = 0.0
        self._row_share = prior_row_share
        self._row_ns = 0.0

    @property
    def row_share(self) -> float:
        """The time of a further row as a share of a pass with one row, in [0, 1]."""
        return self._row_share

    @property
    def row_ns(self) -> float:
        """The time of a further row in nanoseconds; 0 before passes of different sizes were seen."""
        return self._row_ns

    def passed(self, num_rows: int, ns: int) -> None:
        """Take in a pass over `num_rows` that took `ns`."""
        self._num = MEMORY * self._num + 1
        self._rows = MEMORY * self._rows + num_rows
        self._ns = MEMORY * self._ns + ns
        self._rows_squared = MEMORY * self._rows_squared + num_rows**2
        self._rows_ns = MEMORY * self._rows_ns + num_rows * ns
        variation = self._rows_squared - self._rows**2 / self._num
        most_ns = ns / num_rows  # as if rows shared nothing
        if variation < MIN_VARIATION:
            # a cost that is too high keeps rows away, and with them the passes that would correct it
            self._row_ns = min(FORGETTING * self._row_ns, most_ns)
            return
        slope = (self._rows_ns - self._rows * self._ns / self._num) / variation
        one_row = self._ns / self._num + slope * (1 - self._rows / self._num)
        self._row_ns = min(max(0.0, slope), most_ns)
        self._row_share = min(1.0, max(0.0, slope / one_row)) if one_row > 0 else 1.0
