"""What every way of loading a model wants to know."""

from __future__ import annotations

from dataclasses import dataclass

from amusd.models.graphs import Capture
from amusd.models.linear import INT8
from amusd.models.numerics import Numerics
from amusd.models.sharding import ALONE, Ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadOptions:
    """How a model computes, and where."""

    numerics: Numerics
    """How passes are cut and padded."""
    max_model_len: int
    """Longest sequence in tokens; a model whose own limit is lower keeps to that."""
    dtype: str = "bfloat16"
    """Of the weights: one of torch's, or `int8`, into which they are put from float32."""
    device: str = "cpu"
    model_impl: str = "auto"
    """`amusd` for the lean decoder, `transformers` for its own code, `auto` for the first that covers the model."""
    capture: Capture | None = None
    """How passes on a GPU are captured to be replayed; None on a CPU."""
    tokens_per_step: int = 1
    """That one replay chooses."""
    ranks: Ranks = ALONE
    """Those that share the model."""

    @property
    def is_int8(self) -> bool:
        """Whether the model multiplies in int8."""
        return self.dtype == INT8
