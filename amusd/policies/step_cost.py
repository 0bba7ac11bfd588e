"""What a further row adds to a draft step, found from the steps themselves.

Rows of one step share its fixed cost (weights are read once), so the first alternatives are nearly free; how nearly is
a matter of model and machine. A straight line through recent steps tells it: seconds over rows.
"""

from __future__ import annotations

MEMORY = 0.98
"""Weight of the past, for each step."""
PRIOR_ROW_SHARE = 0.06
"""Before steps of different sizes were seen."""
MIN_VARIATION = 8.0
"""Weighted sum of squared deviations of the number of rows that a line is fitted to."""


class StepCost:
    """A line through recent steps, those of the past weighing less."""

    def __init__(self) -> None:
        self._num = self._rows = self._ns = self._rows_squared = self._rows_ns = 0.0
        self._row_share = PRIOR_ROW_SHARE

    @property
    def row_share(self) -> float:
        """Of a step with one row, in [0, 1]."""
        return self._row_share

    def stepped(self, num_rows: int, ns: int) -> None:
        """A step over `num_rows` took this long."""
        self._num = MEMORY * self._num + 1
        self._rows = MEMORY * self._rows + num_rows
        self._ns = MEMORY * self._ns + ns
        self._rows_squared = MEMORY * self._rows_squared + num_rows**2
        self._rows_ns = MEMORY * self._rows_ns + num_rows * ns
        variation = self._rows_squared - self._rows**2 / self._num
        if variation < MIN_VARIATION:
            return
        slope = (self._rows_ns - self._rows * self._ns / self._num) / variation
        one_row = self._ns / self._num + slope * (1 - self._rows / self._num)
        self._row_share = min(1.0, max(0.0, slope / one_row)) if one_row > 0 else 1.0
