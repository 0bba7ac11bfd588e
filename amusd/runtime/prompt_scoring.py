"""One prompt whose tokens the target scores: how likely each is behind those before it. Nothing is generated."""

from __future__ import annotations

from dataclasses import dataclass, field

from amusd.errors import NotFiniteError
from amusd.models.language_model import DigestRequest, KVCache, LanguageModel, ModelOutput, SequenceRows
from amusd.sampling.digest import Digests
from amusd.sampling.known_rows import PassRows
from amusd.types import TopLogprobs


@dataclass(eq=False)
class PromptScoring:
    """The scores of a prompt, in chunks as small as a block of candidates, so that no other sequence waits for long."""

    prompt: tuple[int, ...]
    num_top: int
    """How many of the most likely tokens are reported in the place of each."""
    cache: KVCache
    digests: Digests | None
    """The digests of the model, if its logits are on a device."""
    logprobs: list[float] = field(default_factory=list)
    """Log-probabilities of the tokens behind the first one, as far as they are scored."""
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    """One entry for each of these; empty unless asked for."""
    error: NotFiniteError | None = None
    """Why it cannot go on."""

    @property
    def is_over(self) -> bool:
        """Nothing is left to score, or it cannot go on."""
        return self.error is not None or len(self.logprobs) == len(self.prompt) - 1

    def rows(self, model: LanguageModel) -> SequenceRows:
        """Its rows in the next pass."""
        start = self.cache.length
        end = min(start + model.max_rows(start), len(self.prompt) - 1)
        wanted = None
        if self.digests is not None:
            digest = self.digests.many
            asked = [[token_id] for token_id in self.prompt[start + 1 : end + 1]]
            wanted = DigestRequest(digest, digest.inputs([0] * len(asked), asked=asked))
        return SequenceRows(self.prompt[start:end], self.cache, wanted)

    def take(self, output: ModelOutput) -> None:
        """Keep the scores that a pass over `rows` has given."""
        rows = PassRows(output.logits, None if self.digests is None else self.digests.many, output.digests)
        try:
            self._take(rows, output.logits.shape[0])
        except NotFiniteError as error:
            self.cache.truncate(0)
            self.cache.wipe()
            place = len(self.logprobs) + 1
            self.error = NotFiniteError(f"target: {error} at position {place} of a prompt that is scored")

    def _take(self, rows: PassRows, number: int) -> None:
        start = len(self.logprobs) + 1
        for row, token_id in enumerate(self.prompt[start : start + number]):
            self.logprobs.append(rows.log_probability(row, token_id))
            if self.num_top:
                self.top_logprobs.append(rows.top_log_probabilities(row, self.num_top))
