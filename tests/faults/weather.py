"""The faults, and how often they happen: each seed has some of them, some of them often.

Faults of a frame are drawn when it is sent. Others strike from time to time, and last for a while. A draft may also end
at any of its actions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from faults.world import Side, World

FRAME_FAULTS = ("lose", "duplicate", "echo", "reorder", "delay", "corrupt", "truncate")
ECHO_OF_INCARNATION = "echo of an incarnation"
"""When an incarnation begins, the last frames of the one before arrive once more, in either direction."""
STRIKES = ("partition", "partition one way", "pause target", "pause draft", "slow draft", "target clock", "draft clock")
ENDINGS = ("crash", "fail", "cut")
"""The process is killed; its drafter raises an error, which it reports; the link ends though both sides run."""
FAULTS = (*FRAME_FAULTS, ECHO_OF_INCARNATION, *STRIKES, *ENDINGS)

TO_TARGET, TO_DRAFT = "to target", "to draft"


@dataclass
class Weather:
    world: World
    rates: dict[str, float] = field(default_factory=dict)
    """Probability per frame, or per action of a draft (`ENDINGS`); of strikes, how much of them each kind is."""
    slow_until_ns: int = 0
    draft_stopped_until_ns: int = 0
    target_stops_for_ns: int = 0
    _blocked_until_ns: dict[str, int] = field(default_factory=lambda: {TO_TARGET: 0, TO_DRAFT: 0})
    _holding: bool = False
    _held: list[Callable[[], None]] = field(default_factory=list)

    def break_out(self) -> None:
        draw = self.world.random
        self.rates = {
            **{name: draw.choice((0.02, 0.05, 0.15)) for name in FRAME_FAULTS if draw.random() < 0.5},
            **{name: 0.5 for name in (ECHO_OF_INCARNATION,) if draw.random() < 0.5},
            **{name: draw.choice((1, 3)) for name in STRIKES if draw.random() < 0.5},
            **{name: draw.choice((0.001, 0.004, 0.01)) for name in ENDINGS if draw.random() < 0.4},
        }
        self.world.note(f"weather {self.rates}")
        self._plan_strike()

    def calm(self) -> None:
        """End all faults: stopped processes go on, and delayed frames are delivered."""
        self.world.note("calm")
        self.rates = {}
        self.slow_until_ns = self.draft_stopped_until_ns = self.target_stops_for_ns = 0
        self._blocked_until_ns = {TO_TARGET: 0, TO_DRAFT: 0}
        self._release()

    def hits(self, name: str) -> bool:
        if name not in self.rates or not self.world.chance(self.rates[name]):
            return False
        self.world.happened(name)
        return True

    # One-way partitions

    def blocks(self, direction: str, send: Callable[[], None]) -> bool:
        """True if nothing gets through; then `send` is called when the partition is over, or never."""
        if self._blocked_until_ns[direction] <= self.world.now_ns:
            return False
        self.world.happened("partitioned")
        if self._holding:
            self._held.append(send)
        return True

    def _release(self) -> None:
        held, self._held = self._held, []
        for send in held:
            send()

    # Strikes

    def _plan_strike(self) -> None:
        self.world.plan(self.world.between(20, 300), self._strike)

    def _strike(self) -> None:
        draw = self.world.random
        kinds = [name for name in STRIKES if name in self.rates]
        if not kinds:
            return
        kind = draw.choices(kinds, [self.rates[name] for name in kinds])[0]
        duration_ns = self.world.between(*draw.choice(((5, 50), (50, 400), (400, 1500))))
        end_ns = self.world.now_ns + duration_ns
        self.world.happened(kind)
        if kind.startswith("partition"):
            directions = [TO_TARGET, TO_DRAFT] if kind == "partition" else [draw.choice((TO_TARGET, TO_DRAFT))]
            self._blocked_until_ns.update(dict.fromkeys(directions, end_ns))
            self._holding = draw.random() < 0.5
            self.world.plan(duration_ns, self._release)
        elif kind == "pause target":
            self.target_stops_for_ns = duration_ns
        elif kind == "pause draft":
            self.draft_stopped_until_ns = end_ns
        elif kind == "slow draft":
            self.slow_until_ns = end_ns
        else:
            side: Side = self.world.target if kind == "target clock" else self.world.draft
            side.offset_ns += duration_ns
        self._plan_strike()

    def damaged(self, frame: bytes) -> bytes:
        draw = self.world.random
        if self.hits("corrupt"):
            damaged = bytearray(frame)
            for _ in range(draw.randint(1, 3)):
                damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
            frame = bytes(damaged)
        if self.hits("truncate"):
            frame = frame[: draw.randrange(len(frame))]
        return frame

    def detour_ns(self, name: str) -> int:
        return self.world.between(1, 120) if self.hits(name) else 0
