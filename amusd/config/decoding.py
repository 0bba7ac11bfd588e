"""Settings of one request: what its tokens are drawn from, and when which worker does what."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from amusd.config.plugins import POLICIES, entry_point_names, is_reference
from amusd.errors import ConfigError
from amusd.settings import check_range, check_seconds, convert_fields, nearest, require, shown
from amusd.types import Mode

AsynchronousPolicy: TypeAlias = Literal["auto", "chain", "windowed", "branching"]
PolicyName: TypeAlias = AsynchronousPolicy | str
"""One of them, or code of the user's own (`docs/writing_a_drafter.md`)."""
AcceptanceRule: TypeAlias = Literal["auto", "greedy", "matching", "rejection"]

MAX_BIASES = 1 << 16
"""Entries of `sampling.logit_bias` at most."""
MAX_TOP_LOGPROBS = 20
"""Entries of `top_logprobs` of a token at most."""
MAX_FAN_OUT = 1 << 12
"""Candidates behind one token of a tree, and nodes of one step, at most."""
_LARGEST = 1e6
"""Numbers that logits are changed by at most, or they would not be float32 numbers afterwards."""


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """The distribution that each token of an answer is drawn from, and its noise. Both workers apply it."""

    temperature: float = 0.0
    """0: greedy decoding. Above: the target's distribution is sampled, sharper below 1 and flatter above."""
    top_k: int = 0
    """Sample from this many most likely tokens only; 0: from all."""
    top_p: float = 1.0
    """Sample from the fewest most likely tokens that together have this probability."""
    min_p: float = 0.0
    """Sample from the tokens that are at least this share as likely as the most likely one."""
    repetition_penalty: float = 1.0
    """Logits of tokens in prompt or answer are divided by this if positive, else multiplied; 1: none."""
    presence_penalty: float = 0.0
    """Taken off the logits of tokens that the answer holds already."""
    frequency_penalty: float = 0.0
    """Taken off the logit of a token once for each time that the answer holds it already."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs [token id, bias], or from Python a mapping: added to the token's logit before anything else."""
    acceptance: AcceptanceRule = "auto"
    """How candidates are accepted. `auto`: `greedy` at temperature 0, above it `matching` (shared noise)."""
    seed: int = 0
    """Seeds all noise. With `matching`, an answer is a function of prompt, parameters and seed, not of the draft."""

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            require(math.isfinite(getattr(self, name)), f"sampling.{name}", getattr(self, name), "must be finite")
        check_range(self, "sampling.", "temperature", "top_k", least=0)
        check_range(self, "sampling.", "top_p", above=0, most=1)
        check_range(self, "sampling.", "min_p", least=0, most=1)
        check_range(self, "sampling.", "repetition_penalty", above=0)
        require(
            len(self.logit_bias) <= MAX_BIASES,
            "sampling.logit_bias",
            f"({len(self.logit_bias)} entries)",
            f"at most {MAX_BIASES} are allowed",
        )
        for token_id, bias in self.logit_bias:
            require(
                token_id >= 0 and math.isfinite(bias),
                "sampling.logit_bias",
                [token_id, bias],
                "must be a token id, at least 0, and a finite number",
            )
        require(0 <= self.seed < 1 << 63, "sampling.seed", self.seed, "must be between 0 and 2^63 - 1")
        fitting = ("auto", "greedy") if self.temperature == 0 else ("auto", "matching", "rejection")
        require(
            self.acceptance in fitting,
            "sampling.acceptance",
            self.acceptance,
            f"at sampling.temperature={self.temperature:g} allowed: {', '.join(fitting)}",
        )

    @property
    def rule(self) -> AcceptanceRule:
        """The rule that holds: never `auto`."""
        if self.acceptance != "auto":
            return self.acceptance
        return "greedy" if self.temperature == 0 else "matching"

    @property
    def is_argmax(self) -> bool:
        """Whether each token is simply that of the largest logit."""
        return self.temperature == 0 and self._leaves_logits

    @property
    def is_plain(self) -> bool:
        """Whether nothing but the temperature stands between the model's distribution and the one that is sampled."""
        has_filters = (self.top_k, self.top_p, self.min_p) != (0, 1.0, 0.0)
        return self._leaves_logits and (self.temperature == 0 or not has_filters)

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens before a row change its logits."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def _leaves_logits(self) -> bool:
        return not (self.has_penalties or self.logit_bias)


GREEDY = Distribution()
"""Each token is that of the largest logit."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams(Distribution):
    """The distribution of one answer, and when it ends."""

    max_new_tokens: int = 128
    """Tokens of the answer at most."""
    stop: tuple[str, ...] = ()
    """The answer ends where one of these strings is completed; the text is cut before it."""
    ignore_eos: bool = False
    """Go on after an end-of-sequence token (for measurements)."""
    logprobs: bool = False
    """Report the log-probability of each token of the answer: the target's own, before anything above is applied."""
    top_logprobs: int = 0
    """Report the most likely tokens, this many, with their log-probabilities, beside each token; sets `logprobs`."""

    def __post_init__(self) -> None:
        convert_fields(self, "sampling.")
        if self.top_logprobs:
            object.__setattr__(self, "logprobs", True)
        super().__post_init__()
        self._check_sizes()
        check_range(self, "sampling.", "max_new_tokens", least=1)
        check_range(self, "sampling.", "top_logprobs", least=0, most=MAX_TOP_LOGPROBS)
        require(all(self.stop), "sampling.stop", list(self.stop), "a stop string must not be empty")

    def _check_sizes(self) -> None:
        """Raise `ConfigError` for numbers that float32 or a message cannot hold."""
        for name in ("temperature", "repetition_penalty"):
            value, is_off = getattr(self, name), name == "temperature" and self.temperature == 0
            allowed = f"must be between {1 / _LARGEST:g} and {_LARGEST:g}"
            require(is_off or 1 / _LARGEST <= value <= _LARGEST, f"sampling.{name}", value, allowed)
        allowed = f"must be between {-_LARGEST:g} and {_LARGEST:g}"
        for name in ("presence_penalty", "frequency_penalty"):
            require(abs(getattr(self, name)) <= _LARGEST, f"sampling.{name}", getattr(self, name), allowed)
        for token_id, bias in self.logit_bias:
            require(abs(bias) <= _LARGEST, "sampling.logit_bias", [token_id, bias], f"the bias {allowed}")
        require(self.top_k < 1 << 31, "sampling.top_k", self.top_k, "must be below 2^31")

    @property
    def distribution(self) -> Distribution:
        """The part that the draft is told."""
        return Distribution(**{f.name: getattr(self, f.name) for f in dataclasses.fields(Distribution)})


def check_policy(key: str, name: str | None) -> None:
    """Raise `ConfigError` unless a policy may be meant. Does not look whether the user's code is there."""
    allowed: tuple[str, ...] = get_args(AsynchronousPolicy)
    if name in allowed or (name is not None and is_reference(name)):
        return
    allowed += entry_point_names(POLICIES)
    if name not in allowed:
        raise ConfigError(f"{key}={shown(name)}: allowed: {', '.join(allowed)}{nearest(shown(name), allowed)}")


@dataclass(frozen=True, kw_only=True)
class DecodingConfig:
    """The schedule of one request; any two requests of an engine may differ in it."""

    mode: Mode = Mode.ASYNCHRONOUS
    policy: PolicyName = "auto"
    """Asynchronous mode only. `chain`: the draft follows its best guess; `windowed`: it fills one window while another
    is verified; `branching`: it prepares for several verdicts (not with `sampling.acceptance=rejection`); `auto`: that
    where it can, and waits as long as it finds worth it. Or a policy of your own (`docs/writing_a_drafter.md`)."""
    num_speculative_tokens: int = 4
    """Synchronous mode: candidates per verification; `windowed`: tokens of a window."""
    tree: bool = False
    """Synchronous mode: a block is a tree of so many draft steps, not a chain (not with the ratio test)."""
    max_lookahead: int = 16
    """Chain, branching, auto: tokens that the draft may be ahead of the prefix it knows."""
    min_candidates: int = 2
    """Chain, branching: candidates the target waits for where the draft starts anew."""
    max_wait_passes: float = 1.0
    """Chain, branching, auto: the longest such wait, in target passes."""
    fan_out: int = 8
    """Trees: candidates that the draft prepares behind each token at most."""
    rows_per_step: int = 16
    """Trees: tokens that the draft computes in one step at most."""
    verify_breadth: int = 3
    """Trees: candidates of one position that a target pass verifies at most, where further rows cost next to nothing
    (on a CPU with `verify_width=fixed`, on a GPU)."""
    draft_timeout_seconds: float = 10.0
    """Synchronous mode, windowed: the longest wait for a block."""
    max_silence_seconds: float = 0.3
    """The longest wait, all in all, for a draft that says nothing."""

    def __post_init__(self) -> None:
        convert_fields(self, "")
        check_policy("policy", self.policy)
        counts = ("num_speculative_tokens", "max_lookahead", "fan_out", "rows_per_step", "verify_breadth")
        check_range(self, "", *counts, least=1)
        for name in counts:
            require(getattr(self, name) < 1 << 31, name, getattr(self, name), "must be below 2^31")
        for name in ("fan_out", "rows_per_step"):
            require(getattr(self, name) <= MAX_FAN_OUT, name, getattr(self, name), f"must be at most {MAX_FAN_OUT}")
        check_range(self, "", "min_candidates", least=0)
        require(
            self.min_candidates <= self.max_lookahead,
            "min_candidates",
            self.min_candidates,
            f"must be at most max_lookahead ({self.max_lookahead}), or the target waits for what cannot come",
        )
        require(self.max_wait_passes >= 0, "max_wait_passes", self.max_wait_passes, "must be at least 0")
        for name in ("draft_timeout_seconds", "max_silence_seconds"):
            check_seconds(name, getattr(self, name))
