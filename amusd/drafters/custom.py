"""A drafter from outside the package (`docs/writing_a_drafter.md`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from amusd.checkpoints.loading import model_path, target_settings
from amusd.checkpoints.synthetic import SyntheticTokenizer
from amusd.checkpoints.tokenizer import Tokenizer, load_tokenizer
from amusd.config import DrafterConfig, EngineConfig
from amusd.config.plugins import call, failing_in_one_line, load_function
from amusd.drafters.base import Drafter, DrafterFactory
from amusd.errors import ConfigError
from amusd.settings import shown

_KEY = "drafter.factory"


@dataclass(frozen=True, kw_only=True)
class DrafterContext:
    """The argument of a factory."""

    options: Mapping[str, Any]
    device: str
    """The device of the draft: `cpu`, or `cuda:` and a number."""
    engine: EngineConfig

    @property
    def target_path(self) -> str | None:
        """Folder or hub name of the target's checkpoint; None for random weights."""
        return None if self.engine.hardware.synthetic is not None else model_path(self.engine.target)

    @functools.cached_property
    def vocab_size(self) -> int:
        """The target's token ids are in `[0, vocab_size)`. Reads the target's configuration alone."""
        return int(target_settings(self.engine).get_text_config().vocab_size)

    def load_tokenizer(self) -> Tokenizer:
        """The target's tokenizer."""
        path = self.target_path
        return SyntheticTokenizer(self.vocab_size) if path is None else load_tokenizer(path)


def load_own(config: DrafterConfig, engine: EngineConfig, device: str) -> DrafterFactory:
    """Call the function that `config` names; return its factory, whose drafters are checked.

    Raises a `ConfigError` of one line for any error in the function; so does the returned factory.
    """
    named = str(config.factory)
    context = DrafterContext(options=config.options, device=device, engine=engine)
    return functools.partial(_checked, named, call(_KEY, named, (Callable,), load_function(_KEY, named), context))


def _checked(named: str, factory: DrafterFactory, num_seqs: int) -> Sequence[Drafter]:
    with failing_in_one_line(_KEY, named):
        made = list(call(_KEY, named, (Iterable,), factory, num_seqs))
    if len({id(drafter) for drafter in made}) != num_seqs or not all(isinstance(drafter, Drafter) for drafter in made):
        found = f"{_KEY}={shown(named)}: makes {shown(repr(made))}"
        raise ConfigError(f"{found}; expected {num_seqs} different objects of amusd.drafters.base.Drafter")
    return made
