"""Distil the embedded target into a draft of a few layers.

    python experiments/embedded_draft/train.py --corpus CORPORA/ --out DRAFT/

Writes `weights.safetensors`, `output_ids.npy` (the draft's vocabulary, most frequent first) and `training.json`
(settings, curve, cost). An interrupted run resumes from `checkpoint.pt`.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dataset import Text, join, known_tokens, offsets, read_corpora
from losses import BlockLoss, agreement, loss_of_block, negative_log_acceptance
from progress import Progress
from safetensors.torch import save_file
from student import Student
from teacher import load_teacher, stop_ids
from torch import Tensor

from amusd.checkpoints.embedded_draft import read_draft

HELD_OUT_SHARE = 1 / 86
"""Rows of each corpus that no run learns from, whatever its share of the data."""
CURVE_POINTS = 6
CHECKPOINT_SECONDS = 300.0
WEIGHT_DECAY = 0.1


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="folder of corpora that label.py wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--draft-file", type=Path, help="go on with the layers of this draft")
    parser.add_argument(
        "--layers", default="0,1,2", help="layer of the target that each layer starts from, without --draft-file"
    )
    parser.add_argument(
        "--vocab-size", type=int, default=8192, help="output tokens to learn; the list has as many as --draft-file"
    )
    parser.add_argument("--epochs", type=float, default=2.5)
    parser.add_argument(
        "--cooldown", type=float, default=0.6, help="share of the steps in which the rate falls to zero"
    )
    parser.add_argument("--rows", type=int, default=8, help="rows of a batch")
    parser.add_argument("--lr", type=float, default=0.002, help="of the matrices; norms: a tenth, 0.001 at most")
    parser.add_argument("--compile", action="store_true", help="torch.compile: needs a C++ compiler, for long runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    train(parser.parse_args())


def train(arguments: argparse.Namespace) -> None:
    """The whole run."""
    torch.manual_seed(arguments.seed)
    run = Run(arguments)
    run.resume()
    if run.progress.step == 0:
        run.evaluate()
    saved_at = time.monotonic()
    for rows in run.batches():
        run.learn(rows)
        if run.progress.step % max(1, run.num_steps // CURVE_POINTS) == 0 or run.progress.step == run.num_steps:
            run.evaluate()
        if time.monotonic() - saved_at > CHECKPOINT_SECONDS:
            run.save()
            saved_at = time.monotonic()
    run.finish()


class Run:
    """A student in training."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        texts, self._states = read_corpora(arguments.corpus)
        self._text = join(texts)
        self._starts = offsets(self._text)
        self._held_out, self.pool = split([len(text.length) for text in texts])
        self.num_steps = math.ceil(arguments.epochs * math.ceil(len(self.pool) / arguments.rows))

        teacher = load_teacher(arguments.device)
        self._head = teacher.get_output_embeddings().weight.detach()
        learned_from = self._text.select(self.pool)
        layers = [int(layer) for layer in arguments.layers.split(",")]
        before = None if arguments.draft_file is None else read_draft(arguments.draft_file)
        self._student = Student(teacher, layers if before is None else range(before.num_layers)).float()
        self._before: dict[str, Any] | None = None
        num_ids = arguments.vocab_size
        if before is not None:
            self._before = dict(before.facts)
            self._student.load_trained_weights(before.tensors)
            num_ids = max(num_ids, len(before.output_ids))
        self._output_ids = most_frequent(learned_from, num_ids, self._head.shape[0], sorted(stop_ids(teacher)))
        learned_ids = self._output_ids[: arguments.vocab_size]
        self._ids = torch.from_numpy(learned_ids).to(arguments.device)
        self._student_head = self._head[self._ids].contiguous()
        self._known = known_tokens(self._text)
        self._column_of = torch.full((self._head.shape[0],), -1, device=arguments.device)
        self._column_of[self._ids] = torch.arange(len(learned_ids), device=arguments.device)
        self._optimizer = make_optimizer(self._student, arguments.lr)
        self._block_loss: BlockLoss = loss_of_block
        if arguments.compile:
            self._student.compile()
            self._block_loss = torch.compile(loss_of_block)

        self.progress = Progress(arguments.out)

    def batches(self) -> Iterator[np.ndarray]:
        """Row numbers of the steps that are left."""
        arguments = self._arguments
        return batches(
            self.pool, self._text.length, arguments.rows, self.num_steps, arguments.seed, skip=self.progress.step
        )

    def learn(self, rows: np.ndarray) -> None:
        """One step."""
        began = time.monotonic()
        for group in self._optimizer.param_groups:
            group["lr"] = group["peak"] * schedule(self.progress.step, self.num_steps, self._arguments.cooldown)
        token_ids, target_states, counted, (known_ids, biases, slopes) = self._load(rows)
        hidden = self._states_of_student(token_ids)[counted]
        columns = self._column_of[known_ids]
        total = negative_log_acceptance(
            hidden, target_states, self._student_head, columns, biases, slopes, self._block_loss
        )
        self.progress.learn(self._student, self._optimizer, total / len(hidden))
        told = self.progress.stepped(began, len(hidden))
        step, seconds = self.progress.step, self.progress.seconds
        left = (self.num_steps - step) * seconds / step / 60
        print(f"\r{told}, {left:.0f} min left ", end="", flush=True)

    @torch.no_grad()
    def evaluate(self) -> None:
        """Agreement and acceptance of the mixture over the answers in the rows held out; a point of the curve.

        The draft proposes the tokens that it learns.
        """
        greedy, sampled = [], []
        for rows in np.array_split(self._held_out, math.ceil(len(self._held_out) / 8)):
            token_ids, target_states, counted, known = self._load(rows)
            hidden = self._states_of_student(token_ids)[counted]
            parts = agreement(hidden, target_states, self._head, self._ids, *known)
            greedy.append(parts[0])
            sampled.append(parts[1])
        self.progress.measured(
            round(float(torch.cat(greedy).float().mean()), 4), round(float(torch.cat(sampled).mean()), 4)
        )

    def save(self) -> None:
        """Write a checkpoint."""
        self.progress.save(student=self._student.state_dict(), optimizer=self._optimizer.state_dict())

    def resume(self) -> None:
        """Resume from the checkpoint, if there is one."""
        if saved := self.progress.resume():
            self._student.load_state_dict(saved["student"])
            self._optimizer.load_state_dict(saved["optimizer"])

    def finish(self) -> None:
        """Write the result; the last checkpoint is no longer needed."""
        folder = self._arguments.out
        weights = {name: tensor.contiguous() for name, tensor in self._student.trained_weights().items()}
        save_file(weights, folder / "weights.safetensors")
        np.save(folder / "output_ids.npy", self._output_ids)
        settings = {
            name: value.name if isinstance(value, Path) else value for name, value in vars(self._arguments).items()
        }
        report = {
            "settings": settings,
            "rows": len(self.pool),
            "tokens": int(self._text.length[self.pool].sum()),
            "seconds": round(self.progress.seconds),
            "curve": self.progress.curve,
            "before": self._before,
        }
        (folder / "training.json").write_text(json.dumps(report, indent=1) + "\n")
        self.progress.checkpoint.unlink(missing_ok=True)
        print()

    def _load(self, rows: np.ndarray) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
        """Tokens [rows, width], the target's states [counted, hidden], and which of the tokens are counted.

        Those are the tokens that an answer's token follows, since nothing else is ever drafted. Then what the n-gram
        cache says behind them: ids, biases, slopes.
        """
        text, device = self._text, self._arguments.device
        width = int(text.length[rows].max())
        token_ids = torch.from_numpy(text.token_ids[rows, :width])
        counted = np.zeros((len(rows), width), dtype=bool)
        counted[:, :-1] = text.answer[rows, 1:width]
        of_rows = [np.flatnonzero(own) for own in counted]
        places = np.concatenate([self._starts[row] + own for row, own in zip(rows, of_rows, strict=True)])
        states = torch.cat([self._states[row][own] for row, own in zip(rows, of_rows, strict=True)])
        known = tuple(each.to(device) for each in self._known.at(places))
        return token_ids.to(device), states.to(device), torch.from_numpy(counted).to(device), known

    def _states_of_student(self, token_ids: Tensor) -> Tensor:
        """[rows, width, hidden], in the teacher's dtype: bfloat16, or float32 on CPUs that lack it."""
        dtype = self._head.dtype
        with torch.autocast(token_ids.device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            states: Tensor = self._student(token_ids)
        return states


def split(corpora: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of the rows held out, and of the others in some order, of corpora with so many rows each.

    What is held out of a corpus does not depend on what other corpora there are.
    """
    held_out, others, start = [], [], 0
    for num_rows in corpora:
        order = start + np.random.default_rng(0).permutation(num_rows)
        num_held_out = math.ceil(HELD_OUT_SHARE * num_rows)
        held_out.append(order[:num_held_out])
        others.append(order[num_held_out:])
        start += num_rows
    return np.concatenate(held_out), np.random.default_rng(0).permutation(np.concatenate(others))


def make_optimizer(student: Student, lr: float) -> torch.optim.Optimizer:
    """AdamW for matrices and norms; each group remembers its highest learning rate as `peak`."""
    trained = [parameter for parameter in student.parameters() if parameter.requires_grad]
    groups = [
        {"params": [each for each in trained if each.ndim == 2], "weight_decay": WEIGHT_DECAY, "peak": lr},
        {"params": [each for each in trained if each.ndim != 2], "weight_decay": 0.0, "peak": min(1e-3, lr / 10)},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


def schedule(step: int, num_steps: int, cooldown: float) -> float:
    """Share of the highest learning rate: up within 2 % of the steps, flat, to zero in the last `cooldown` of them."""
    return min(1.0, (step + 1) / max(1, num_steps // 50), (num_steps - step) / max(1, cooldown * num_steps))


def batches(
    pool: np.ndarray, length: np.ndarray, rows: int, num_steps: int, seed: int, skip: int
) -> Iterator[np.ndarray]:
    """Row numbers of each batch from number `skip` on: each row once an epoch, rows of similar length together."""
    random = np.random.default_rng(seed)
    number = 0
    while number < num_steps:
        order = random.permutation(pool)
        order = order[np.argsort(length[order], kind="stable")]
        parts = [order[start : start + rows] for start in range(0, len(order), rows)]
        for part in random.permutation(len(parts))[: num_steps - number]:
            if number >= skip:
                yield parts[part]
            number += 1


def most_frequent(text: Text, vocab_size: int, available: int, first: Sequence[int]) -> np.ndarray:
    """`vocab_size` ids: those of `first`, then those that answers hold most often, ties by the lower id."""
    counts = np.bincount(text.token_ids[text.answer], minlength=available)
    counts[list(first)] = -1
    others = np.argsort(-counts, kind="stable")[: available - len(first)]
    return np.concatenate((first, others))[:vocab_size].astype(np.int64)


if __name__ == "__main__":
    main()
