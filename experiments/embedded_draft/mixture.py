"""What should an n-gram cache add to the draft's guesses (`WEIGHTS` of `amusd/drafters/ngram.py`)?

    python experiments/embedded_draft/mixture.py --corpus CORPORA/

It reads the answers in the rows that no training learns from. In every other row it finds the weights with which the
target accepts most (`losses.py`): a bias for each number of agreeing tokens, a slope for one, for more and for the
most, and what a token that the draft cannot propose counts as (`UNPROPOSED` of `amusd/sampling/ranking.py`). The
package has them rounded. In the rows between them it counts what they are worth: how often the target's likeliest token
is among the first 1, 2, 4 and 8 guesses, and how much is accepted at temperature 1.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from dataset import join, known_behind, read_corpora
from losses import mixed_log_weights
from student import Student
from teacher import load_teacher
from torch import Tensor
from train import split

from amusd.config import DrafterConfig
from amusd.drafters.ngram import MAX_CONTINUATIONS, WEIGHTS
from amusd.models.embedded_draft import DRAFT_FILE, DraftWeights, read_draft
from amusd.sampling.ranking import UNPROPOSED

DEPTHS = (1, 2, 4, 8)
STEPS = 200
KEPT = 256
"""Likeliest tokens of the draft that are looked at; what the target accepts of all others is not counted."""
_LEAST = 1e-3
"""Acceptance that a token counts with at least."""


@dataclass(frozen=True, slots=True)
class Places:
    """Tokens of answers, one behind the other: the cache's tokens come first, then the draft's likeliest others."""

    agreeing: Tensor
    """int64 [tokens, MAX_CONTINUATIONS]: how many tokens agree, at most as many as make a difference; 0: no token."""
    log_q: Tensor
    """[tokens, MAX_CONTINUATIONS + KEPT]: of the draft; minus infinity where it cannot propose the token."""
    p: Tensor
    """The same: the target's probabilities."""
    log_rest: Tensor
    """[tokens]: logarithm of what the draft gives all other tokens."""
    is_best: Tensor
    """bool, shaped like `p`: whether the token is the target's likeliest of all."""


@dataclass(frozen=True, slots=True)
class Weights:
    """What the cache says."""

    biases: Tensor
    """[numbers of agreeing tokens]."""
    slopes: Tensor
    """Likewise."""
    unproposed: Tensor
    """A number."""

    @classmethod
    def shipped(cls) -> Weights:
        """Those of the package."""
        biases, slopes = torch.tensor(WEIGHTS).unbind(dim=1)
        return cls(biases, slopes, torch.tensor(UNPROPOSED))


def main() -> None:
    """Read the command line and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="folder of generate.py or label.py, or of several")
    parser.add_argument("--draft-file", type=Path, default=DRAFT_FILE)
    arguments = parser.parse_args()
    rows = list(places_in(arguments.corpus, read_draft(arguments.draft_file)))
    if len(rows) == 1:
        parser.error(f"{arguments.corpus}: one row is held out, two are needed")
    learned, judged = (
        Places(*(torch.cat([getattr(row, field.name) for row in half]) for field in fields(Places)))
        for half in (rows[::2], rows[1::2])
    )
    shipped = Weights.shipped()
    fitted = fit(learned, shipped)
    print(f"{'agreeing':>10}{'tokens':>9}{'bias':>8}{'slope':>8}{'ships':>14}")
    for index, (bias, slope) in enumerate(WEIGHTS):
        number, found = int((learned.agreeing == index + 1).sum()), (fitted.biases[index], fitted.slopes[index])
        print(f"{index + 1:>10}{number:>9}{found[0]:>8.2f}{found[1]:>8.2f}{bias:>8.1f}{slope:>6.1f}")
    print(f"unproposed {float(fitted.unproposed):.2f}, ships {UNPROPOSED}\n")
    print(f"{'':>12}" + "".join(f"{f'first {depth}':>9}" for depth in DEPTHS) + f"{'sampled':>9}{'tokens':>8}")
    for name, weights in {"draft": None, "ships": shipped, "fitted": fitted}.items():
        print(f"{name:>12}" + "".join(f"{share:>9.4f}" for share in judge(judged, weights)) + f"{len(judged.p):>8}")


@torch.no_grad()
def places_in(corpus: Path, draft: DraftWeights) -> Iterator[Places]:
    """The answers' tokens of each row that is held out."""
    texts, states = read_corpora(corpus)
    text = join(texts)
    teacher = load_teacher("cpu")
    head = teacher.get_output_embeddings().weight.detach()
    student = Student(teacher, [None] * draft.num_layers).float()
    student.load_trained_weights(draft.tensors)
    output_ids = draft.output_ids[: DrafterConfig.vocab_size]
    held_out, _ = split([each.num_rows for each in texts])
    for row in held_out:
        length = text.length[row]
        token_ids = text.token_ids[row, :length]
        followed = torch.from_numpy(text.answer[row, 1:length]).nonzero().flatten()
        hidden = student(torch.from_numpy(token_ids)[None])[0, followed].to(head.dtype)
        log_q = torch.full((len(followed), len(head)), -torch.inf)
        log_q[:, output_ids] = (hidden @ head[output_ids].t()).float().log_softmax(dim=-1)
        p = (states[row][followed].to(head.dtype) @ head.t()).float().softmax(dim=-1)
        known = known_behind([token_ids.tolist()])
        yield places_of(*(torch.from_numpy(each[followed]) for each in (known.token_ids, known.agreeing)), log_q, p)


def places_of(known: Tensor, agreeing: Tensor, log_q: Tensor, p: Tensor) -> Places:
    """`known`, `agreeing`: [tokens, MAX_CONTINUATIONS]; `log_q`, `p`: [tokens, all ids]; `log_q` is written to."""
    none = agreeing == 0
    of_known = log_q.gather(1, known).masked_fill(none, -torch.inf)
    p_of_known = p.gather(1, known).masked_fill(none, 0.0)
    tokens = torch.arange(len(known)).unsqueeze(1).expand_as(known)
    log_q[tokens[~none], known[~none]] = -torch.inf
    of_others, others = log_q.topk(KEPT, dim=1)
    rest = (log_q.exp().sum(dim=1) - of_others.exp().sum(dim=1)).clamp_min(1e-9).log()
    best = p.argmax(dim=1, keepdim=True)
    is_best = torch.cat((~none & (known == best), others == best), dim=1)
    of_all, p_of_all = torch.cat((of_known, of_others), dim=1), torch.cat((p_of_known, p.gather(1, others)), dim=1)
    return Places(agreeing, of_all, p_of_all, rest, is_best)


def mix(places: Places, weights: Weights | None) -> Tensor:
    """[tokens, MAX_CONTINUATIONS + KEPT]: the probabilities of the mixture; None: of the draft alone."""
    log_q = places.log_q
    if weights is not None:
        known, others = log_q.split((MAX_CONTINUATIONS, KEPT), dim=1)
        index = (places.agreeing - 1).clamp_min(0)
        biases = weights.biases[index].masked_fill(places.agreeing == 0, -torch.inf)
        known = mixed_log_weights(known, biases, weights.slopes[index], weights.unproposed)
        log_q = torch.cat((known, others), dim=1)
    total = torch.cat((log_q, places.log_rest.unsqueeze(1)), dim=1).logsumexp(dim=1, keepdim=True)
    return (log_q - total).exp()


def fit(places: Places, start: Weights) -> Weights:
    """The weights with which the target accepts most of `places`; slopes are for one token, for more, for the most."""
    slope_of = torch.tensor([0, *[1] * (len(WEIGHTS) - 2), 2])
    parameters = [each.clone().requires_grad_() for each in (start.biases, start.slopes[[0, 1, -1]], start.unproposed)]
    optimizer = torch.optim.Adam(parameters, lr=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)

    def weights() -> Weights:
        biases, slopes, unproposed = parameters
        return Weights(biases, slopes[slope_of], unproposed)

    for _ in range(STEPS):
        accepted = torch.minimum(mix(places, weights()), places.p).sum(dim=1)
        optimizer.zero_grad()
        (-accepted.clamp_min(_LEAST).log().mean()).backward()
        optimizer.step()
        schedule.step()
    return Weights(*(getattr(weights(), field.name).detach() for field in fields(Weights)))


@torch.no_grad()
def judge(places: Places, weights: Weights | None) -> list[float]:
    """How often the target's likeliest token is among the first guesses, of `DEPTHS`; what is accepted when sampled."""
    mixed = mix(places, weights)
    best = torch.where(places.is_best, mixed, 0.0).amax(dim=1, keepdim=True)
    ranks = torch.where(best.flatten() > 0, (mixed > best).sum(dim=1), KEPT)
    shares = [float((ranks < depth).float().mean()) for depth in DEPTHS]
    return [*shares, float(torch.minimum(mixed, places.p).sum(dim=1).mean())]


if __name__ == "__main__":
    main()
