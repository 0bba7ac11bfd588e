"""A policy that has the draft rest for spells, as `auto` does where drafting does not pay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from amusd.policies.base import Decision, Policy, TargetView, Verify


@dataclass
class Resting:
    """`policy` for so many passes, then as many of plain decoding that the draft hears nothing of, and so on."""

    policy: Policy
    num_passes: int
    num_decided: int = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)

    def __repr__(self) -> str:
        return f"Resting({self.policy}, {self.num_passes})"

    def decide(self, view: TargetView) -> Decision:
        if self.num_decided // self.num_passes % 2:
            decision: Decision = Verify(0, tells_draft=False)
        else:
            decision = self.policy.decide(view)
        self.num_decided += isinstance(decision, Verify)
        return decision
