"""A language model's weights and one forward pass, as a function of tensors alone.

A network never reads a value on the host, so a pass over fixed addresses can be captured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from amusd.models.adapter import HuggingFaceNetwork
    from amusd.models.decoder import Decoder

Network: TypeAlias = "Decoder | HuggingFaceNetwork"
"""Both have the attributes that `Decoder` describes."""
