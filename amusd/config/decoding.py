"""Settings of one request: the distribution of its tokens, and its schedule."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias, get_args

from msgspec import Meta, structs

from amusd.config.plugins import is_reference
from amusd.errors import ConfigError
from amusd.protocol.messages import MAX_FAN_OUT, Sampling
from amusd.settings import Amount, Count, CountFromZero, PositiveAmount, Settings, Share, Text, nearest, shown
from amusd.types import Mode

AsynchronousPolicy: TypeAlias = Literal["auto", "chain", "windowed", "branching"]
AcceptanceRule: TypeAlias = Literal["auto", "greedy", "matching", "rejection"]

MAX_BIASES = 1 << 16
MAX_TOP_LOGPROBS = 20
MIN_FACTOR = 1e-6
"""Smallest divisor that keeps logits finite in float32."""
_Addend: TypeAlias = Annotated[float, Meta(ge=-1_000_000, le=1_000_000)]
_Factor: TypeAlias = Annotated[float, Meta(ge=MIN_FACTOR, le=1_000_000)]
_FanOut: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_FAN_OUT)]
MAX_VERIFY_BREADTH = 3
"""Most rows of one position in a pass; a third alternative is hardly ever right."""
_Breadth: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_VERIFY_BREADTH)]
_Biases: TypeAlias = Annotated[tuple[tuple[CountFromZero, _Addend], ...], Meta(max_length=MAX_BIASES)]


@dataclass(frozen=True, kw_only=True)
class Distribution(Settings):
    """The distribution of each token of an answer, and the seed of its noise, for both workers."""

    section = "sampling"

    temperature: Amount = 0.0
    """0: greedy decoding. Above: sampling, sharper below 1 and flatter above."""
    top_k: CountFromZero = 0
    """Sample from this many most likely tokens; 0: from all."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Sample from the fewest most likely tokens that together have this probability."""
    min_p: Share = 0.0
    """Sample from tokens with at least this share of the highest probability."""
    repetition_penalty: _Factor = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or answer; 1: no penalty."""
    presence_penalty: _Addend = 0.0
    """Subtracted from the logits of tokens that the answer holds."""
    frequency_penalty: _Addend = 0.0
    """Subtracted from a token's logit for each occurrence in the answer."""
    logit_bias: _Biases = ()
    """Pairs [token id, bias], or in Python a mapping; a bias is added before all else."""
    acceptance: AcceptanceRule = "auto"
    """How candidates are accepted. `auto`: `greedy` at temperature 0, else `matching` (shared noise)."""
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    """Seeds all noise. With `matching`, the answer does not depend on the draft."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(not 0 < self.temperature < MIN_FACTOR, "temperature", f"expected 0, or at least {MIN_FACTOR}")
        fitting = ("auto", "greedy") if self.temperature == 0 else ("auto", "matching", "rejection")
        allowed = f"at sampling.temperature={self.temperature:g} allowed: {', '.join(fitting)}"
        self.require(self.acceptance in fitting, "acceptance", allowed)

    @classmethod
    def of(cls, sampling: Sampling) -> Distribution:
        """The distribution in a message. Raises `ConfigError`."""
        return cls(**structs.asdict(sampling))

    def as_message(self) -> Sampling:
        """This distribution for a message."""
        return Sampling(**dataclasses.asdict(self))

    @property
    def rule(self) -> AcceptanceRule:
        """The acceptance rule, with `auto` resolved."""
        if self.acceptance != "auto":
            return self.acceptance
        return "greedy" if self.temperature == 0 else "matching"

    @property
    def is_argmax(self) -> bool:
        """Whether each token is the one with the largest logit."""
        return self.temperature == 0 and self.is_plain

    @property
    def is_plain(self) -> bool:
        """Whether only the temperature changes the model's distribution."""
        has_filters = self.temperature > 0 and (self.top_k, self.top_p, self.min_p) != (0, 1.0, 0.0)
        return not (has_filters or self.has_penalties or self.logit_bias)

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits of a row."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


GREEDY = Distribution()


@dataclass(frozen=True, kw_only=True)
class SamplingParams(Distribution):
    """The distribution of one answer, and when it ends."""

    max_new_tokens: Count = 128
    stop: tuple[Text, ...] = ()
    """The answer ends where one of these strings is completed; the text is cut before it."""
    ignore_eos: bool = False
    """Go on after an end-of-sequence token (for measurements)."""
    logprobs: bool = False
    """Report each token's log-probability: the target's own, before bias, penalties, temperature and filters."""
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    """Report the log-probabilities of each token and of this many most likely ones."""

    @property
    def distribution(self) -> Distribution:
        """The part that is sent to the draft."""
        return Distribution(**{f.name: getattr(self, f.name) for f in dataclasses.fields(Distribution)})


def check_policy(key: str, name: str) -> None:
    """Raise `ConfigError` unless `name` is a policy, or a reference to user code, which is not loaded here."""
    allowed = get_args(AsynchronousPolicy)
    if name not in allowed and not is_reference(name):
        raise ConfigError(f"{key}={shown(name)}: allowed: {', '.join(allowed)}{nearest(name, allowed)}")


@dataclass(frozen=True, kw_only=True)
class DecodingConfig(Settings):
    """The schedule of one request; requests of an engine may differ in it."""

    mode: Mode = "asynchronous"
    policy: str = "auto"
    """In asynchronous mode, how the draft runs ahead.

    `chain`: it follows its best guess; `windowed`: it fills one window while another is verified; `branching`: it
    prepares for several verdicts (not with `sampling.acceptance=rejection`); `auto`: branching where possible, with
    waits as long as they pay. Or your own (`docs/writing_a_drafter.md`).
    """
    num_speculative_tokens: Count = 4
    """Synchronous mode: candidates per verification; `windowed`: tokens of a window."""
    tree: bool = False
    """Synchronous mode: `num_speculative_tokens` draft steps make a tree, not a chain (not with the ratio test)."""
    max_lookahead: Count = 16
    """Chain, branching, auto: most tokens of the draft beyond the prefix that it knows."""
    min_candidates: CountFromZero = 2
    """Chain, branching: candidates that the target waits for; with chain only after the draft starts anew."""
    max_wait_passes: Amount = 1.0
    """Chain, branching, auto: the longest wait before a pass, in target passes."""
    fan_out: _FanOut = 8
    """Trees: most candidates that the draft prepares after each token; a model ranks up to 16."""
    rows_per_step: _FanOut = 16
    """Trees: most tokens that the draft computes in one step."""
    verify_breadth: _Breadth = MAX_VERIFY_BREADTH
    """Trees: most candidates of one position in a target pass, where further rows are nearly free (on a
    CPU with `verify_width=fixed`, on a GPU).
    """
    max_silence_seconds: PositiveAmount = 0.3
    """Longest total wait for a draft that says nothing."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_policy("policy", self.policy)
        allowed = f"must be at most max_lookahead ({self.max_lookahead}), or the target waits for what cannot come"
        self.require(self.min_candidates <= self.max_lookahead, "min_candidates", allowed)
