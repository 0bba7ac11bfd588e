"""Checks of the two hellos, and reports of a process that cannot go on."""

from __future__ import annotations

from collections.abc import Sequence

from amusd.errors import ConfigError, PeerError, first_line
from amusd.protocol.messages import MAX_TEXT_LENGTH, DraftHello, Failed, TargetHello

BUSY = Failed(PeerError.__name__, "the draft serves another target")
"""The answer of a draft to every target but the one that it serves."""


def check_pair(target: TargetHello, draft: DraftHello, wanted: Sequence[str] = ()) -> None:
    """Raise `ConfigError` if the two cannot work together, or the draft lacks one of the drafters `wanted`."""
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
    """The error that a peer has reported: a `ConfigError` in its words, any other with `who` before them."""
    text = told_by(failure)
    return ConfigError(text) if failure.kind == ConfigError.__name__ else PeerError(f"{who}: {text}")


def told_by(failure: Failed) -> str:
    """The peer's words about its failure, without control characters."""
    return "".join(character if character.isprintable() or character in "\n\t" else "?" for character in failure.text)
