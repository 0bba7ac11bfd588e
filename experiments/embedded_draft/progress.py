"""The progress of a training, for all scripts. It is kept in one file with the networks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

RECENT = 50
"""Number of last losses in the mean on the terminal and in the curve."""


class Progress:
    """Steps, time, tokens, losses, and the curve of measurements."""

    def __init__(self, out: Path) -> None:
        self.step, self.num_tokens, self.seconds = 0, 0, 0.0
        self.losses: list[float] = []
        self.curve: list[dict[str, Any]] = []
        out.mkdir(parents=True, exist_ok=True)
        self.checkpoint = out / "checkpoint.pt"

    @property
    def recent_loss(self) -> float:
        """The mean of the last losses."""
        recent = self.losses[-RECENT:]
        return sum(recent) / max(1, len(recent))

    def learn(self, network: torch.nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
        """One step down the gradient."""
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self.losses.append(float(loss.detach()))
        self.step += 1

    def stepped(self, began: float, num_tokens: int) -> str:
        """Count a step that began at this time (`time.monotonic`); return a line about it."""
        self.num_tokens += num_tokens
        self.seconds += time.monotonic() - began
        return f"step {self.step}, loss {self.recent_loss:.4f}, {self.num_tokens / self.seconds:,.0f} tokens/s"

    def measured(self, greedy: float | Sequence[float], sampled: float | Sequence[float]) -> None:
        """Add a point to the curve."""
        point = {
            "step": self.step,
            "tokens": self.num_tokens,
            "seconds": round(self.seconds),
            "loss": round(self.recent_loss, 4) if self.losses else None,
            "greedy": greedy,
            "sampled": sampled,
        }
        self.curve.append(point)
        print(f"\n{point}", flush=True)

    def save(self, **states: Any) -> None:
        """Write a checkpoint with these states of networks, whole or not at all."""
        own = {name: value for name, value in vars(self).items() if name != "checkpoint"}
        partial = self.checkpoint.with_suffix(".partial")
        torch.save({**states, "progress": own}, partial)
        partial.rename(self.checkpoint)

    def resume(self) -> dict[str, Any] | None:
        """Resume from the checkpoint and return its states; None without one."""
        if not self.checkpoint.exists():
            return None
        saved: dict[str, Any] = torch.load(self.checkpoint, weights_only=True, map_location="cpu")
        vars(self).update(saved["progress"])
        print(f"going on from step {self.step}", flush=True)
        return saved
