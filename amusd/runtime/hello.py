"""Checks of the two hellos, and reports of a process that cannot go on."""

from __future__ import annotations

from collections.abc import Sequence

from amusd.errors import ConfigError, PeerError, first_line
from amusd.protocol.messages import MAX_TEXT_LENGTH, DraftHello, Failed, TargetHello

BUSY = Failed(PeerError.__name__, "the draft serves another target")
"""The answer of a busy draft to all other targets."""


def check_pair(target: TargetHello, draft: DraftHello, wanted: Sequence[str] = ()) -> None:
    """Raise `ConfigError` if the tokenizers differ, or the draft lacks a drafter of `wanted`."""
    # an empty hash: the draft works with any tokenizer
    if draft.tokenizer_hash and draft.tokenizer_hash != target.tokenizer_hash:
        raise ConfigError(
            f"drafter={', '.join(sorted(draft.drafters))}: its tokenizer differs from the "
            "target's; put the target's files at the same path on the draft's machine, or use drafter=ngram"
        )
    if missing := sorted({*wanted} - {*draft.drafters}):
        raise ConfigError(f"drafter={missing[0]}: the draft has {', '.join(sorted(draft.drafters)) or 'none'}")


def failure_report(error: BaseException) -> Failed:
    """The message for an error: its kind and its first line."""
    kind, text = type(error).__name__, first_line(error)
    if isinstance(error, ConfigError):
        kind = ConfigError.__name__
    elif not text.startswith(kind):
        text = f"{kind}: {text}"
    return Failed(kind, text.encode(errors="replace").decode()[:MAX_TEXT_LENGTH])


def reported(failure: Failed, who: str) -> ConfigError | PeerError:
    """The error for a peer's report: `ConfigError` with the text alone, or `PeerError` with `who` before the text."""
    text = told_by(failure)
    return ConfigError(text) if failure.kind == ConfigError.__name__ else PeerError(f"{who}: {text}")


def told_by(failure: Failed) -> str:
    """The text of a peer's failure, unprintable characters replaced."""
    return "".join(character if character.isprintable() or character in "\n\t" else "?" for character in failure.text)
