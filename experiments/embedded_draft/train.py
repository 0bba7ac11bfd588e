"""Distil the embedded target into a draft of a few layers.

    python experiments/embedded_draft/train.py --corpus CORPORA/ --out DRAFT/

Writes `weights.safetensors` (float32, the layers and the final norm), `output_ids.npy` (the draft's vocabulary, most
frequent first) and `training.json` (settings, curve, cost) into DRAFT. An interrupted run goes on from `checkpoint.pt`
there, on another machine too. `plateau.pt` is of the step after which the learning rate falls: run again with more
`--epochs`, it goes on from there.
"""

from __future__ import annotations

import argparse
import functools
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
from safetensors.torch import save_file
from student import Student
from teacher import load_teacher, stop_ids
from torch import Tensor

from amusd.models.embedded_draft import read_draft

HELD_OUT_SHARE = 1 / 86
"""Of the rows of each corpus: no run learns from them, whatever its share of the data."""
CURVE_POINTS = 6
CHECKPOINT_SECONDS = 300.0
CHECKPOINT, PLATEAU = "checkpoint.pt", "plateau.pt"
_SAVED = ("seconds", "num_tokens", "losses", "curve")
"""What a checkpoint holds of a `Run`, beside weights, optimizers and step."""


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="folder of generate.py or label.py, or of several")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--draft-file", type=Path, help="go on with this draft: its layers")
    parser.add_argument("--layers", default="0,1,2", help="layer of the target that each layer starts from; r: random")
    parser.add_argument(
        "--vocab-size", type=int, default=8192, help="output tokens to learn; the list has as many as --draft-file"
    )
    parser.add_argument("--epochs", type=float, default=2.5)
    parser.add_argument(
        "--cooldown", type=float, default=0.6, help="share of the steps in which the rate falls to zero"
    )
    parser.add_argument("--share", type=float, default=1.0, help="share of the rows to learn from")
    parser.add_argument("--rows", type=int, default=8, help="rows of a batch")
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw")
    parser.add_argument("--lr", type=float, default=0.002, help="of the matrices; norms: a tenth, 0.001 at most")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--compile", action="store_true", help="torch.compile: needs a C++ compiler, for long runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    train(parser.parse_args())


def train(arguments: argparse.Namespace) -> None:
    """The whole run."""
    torch.manual_seed(arguments.seed)
    run = Run(arguments)
    run.resume()
    if run.step == 0:
        run.evaluate()
    saved_at = time.monotonic()
    for rows in run.batches():
        run.learn(rows)
        if run.step % max(1, run.num_steps // CURVE_POINTS) == 0 or run.step == run.num_steps:
            run.evaluate()
        if run.step == run.plateau_end:
            run.save(PLATEAU)
        if time.monotonic() - saved_at > CHECKPOINT_SECONDS:
            run.save(CHECKPOINT)
            saved_at = time.monotonic()
    run.finish()


class Run:
    """A student on its way."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        texts, self._states = read_corpora(arguments.corpus)
        self._text = join(texts)
        self._starts = offsets(self._text)
        self._held_out, others = split([text.num_rows for text in texts])
        self.pool = others[: round(arguments.share * len(others))]
        self.num_steps = math.ceil(arguments.epochs * math.ceil(len(self.pool) / arguments.rows))
        self.plateau_end = self.num_steps - math.ceil(arguments.cooldown * self.num_steps)
        self.step = 0

        teacher = load_teacher(arguments.device)
        self._head = teacher.get_output_embeddings().weight.detach()
        learned_from = self._text.select(self.pool)
        layers = [None if layer == "r" else int(layer) for layer in arguments.layers.split(",")]
        self._student = Student(teacher, layers).float()
        self._before: dict[str, Any] | None = None
        num_ids = arguments.vocab_size
        if arguments.draft_file is not None:
            draft = read_draft(arguments.draft_file)
            self._before = dict(draft.facts)
            self._student.load_trained_weights(draft.tensors)
            num_ids = max(num_ids, len(draft.output_ids))
        self._output_ids = most_frequent(learned_from, num_ids, self._head.shape[0], sorted(stop_ids(teacher)))
        learned_ids = self._output_ids[: arguments.vocab_size]
        self._ids = torch.from_numpy(learned_ids).to(arguments.device)
        self._student_head = self._head[self._ids].contiguous()
        self._known = known_tokens(self._text)
        self._column_of = torch.full((self._head.shape[0],), -1, device=arguments.device)
        self._column_of[self._ids] = torch.arange(len(learned_ids), device=arguments.device)
        self._optimizers = make_optimizers(self._student, arguments)
        self._block_loss: BlockLoss = loss_of_block
        if arguments.compile:
            self._student.compile()
            self._block_loss = torch.compile(loss_of_block)

        self._seconds, self._num_tokens = 0.0, 0
        self._losses: list[float] = []
        self._curve: list[dict[str, Any]] = []
        arguments.out.mkdir(parents=True, exist_ok=True)

    def batches(self) -> Iterator[np.ndarray]:
        """Row numbers of the steps that are left."""
        arguments = self._arguments
        return batches(self.pool, self._text.length, arguments.rows, self.num_steps, arguments.seed, skip=self.step)

    def learn(self, rows: np.ndarray) -> None:
        """One step."""
        began = time.monotonic()
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * schedule(self.step, self.num_steps, self._arguments.cooldown)
        token_ids, target_states, counted, (known_ids, biases, slopes) = self._load(rows)
        hidden = self._states_of_student(token_ids)[counted]
        columns = self._column_of[known_ids]
        total = negative_log_acceptance(
            hidden, target_states, self._student_head, columns, biases, slopes, self._block_loss
        )
        loss = total / len(hidden)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._student.parameters(), 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self._losses.append(float(loss.detach()))
        self.step += 1
        self._num_tokens += len(hidden)
        self._seconds += time.monotonic() - began
        left = (self.num_steps - self.step) * self._seconds / self.step / 60
        print(
            f"\rstep {self.step} of {self.num_steps}, loss {self._recent_loss():.4f}, "
            f"{self._num_tokens / self._seconds:,.0f} tokens/s, {left:.0f} min left ",
            end="",
            flush=True,
        )

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
        point = {
            "step": self.step,
            "tokens": self._num_tokens,
            "seconds": round(self._seconds),
            "loss": round(self._recent_loss(), 4) if self._losses else None,
            "greedy": round(float(torch.cat(greedy).float().mean()), 4),
            "sampled": round(float(torch.cat(sampled).mean()), 4),
        }
        self._curve.append(point)
        print(f"\n{point}", flush=True)

    def save(self, name: str) -> None:
        """Write a checkpoint, whole or not at all."""
        partial = self._arguments.out / f"{name}.partial"
        state = {name: getattr(self, f"_{name}") for name in _SAVED}
        optimizers = [optimizer.state_dict() for optimizer in self._optimizers]
        steps = {"step": self.step, "plan": (self.plateau_end, self.num_steps)}
        torch.save({"student": self._student.state_dict(), "optimizers": optimizers, **steps, **state}, partial)
        partial.rename(partial.with_suffix(""))

    def resume(self) -> None:
        """Go on from the last checkpoint whose learning rates were this run's."""
        for name in (CHECKPOINT, PLATEAU):
            path = self._arguments.out / name
            if not path.exists():
                continue
            saved = torch.load(path, weights_only=True, map_location="cpu")
            if saved["step"] <= self.plateau_end or saved["plan"] == (self.plateau_end, self.num_steps):
                break
        else:
            return
        self._student.load_state_dict(saved["student"])
        for optimizer, state in zip(self._optimizers, saved["optimizers"], strict=True):
            peaks = [group["peak"] for group in optimizer.param_groups]
            optimizer.load_state_dict(state)
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["peak"] = peak
        self.step = saved["step"]
        for name in _SAVED:
            setattr(self, f"_{name}", saved[name])
        print(f"going on from step {self.step}")

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
            "seconds": round(self._seconds),
            "curve": self._curve,
            "before": self._before,
        }
        (folder / "training.json").write_text(json.dumps(report, indent=1) + "\n")
        (folder / CHECKPOINT).unlink(missing_ok=True)
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

    def _recent_loss(self) -> float:
        recent = self._losses[-100:]
        return sum(recent) / max(1, len(recent))


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


def make_optimizers(student: Student, arguments: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """Matrices by Muon or AdamW, norms by AdamW; each group remembers its highest learning rate as `peak`."""
    trained = [parameter for parameter in student.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim == 2]
    vectors = [parameter for parameter in trained if parameter.ndim != 2]
    decay = arguments.weight_decay
    adamw = functools.partial(torch.optim.AdamW, betas=(0.9, 0.95), fused=True)
    optimizers: list[torch.optim.Optimizer] = [adamw(vectors, lr=min(1e-3, arguments.lr / 10), weight_decay=0.0)]
    if arguments.optimizer == "muon":
        optimizers.append(torch.optim.Muon(matrices, lr=arguments.lr, weight_decay=decay, adjust_lr_fn="original"))
    else:
        optimizers.append(adamw(matrices, lr=arguments.lr, weight_decay=decay))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return optimizers


def schedule(step: int, num_steps: int, cooldown: float) -> float:
    """Share of the highest learning rate: up within 2 % of the steps, flat, to zero in the last `cooldown` of them."""
    return min(1.0, (step + 1) / max(1, num_steps // 50), (num_steps - step) / max(1, cooldown * num_steps))


def batches(
    pool: np.ndarray, length: np.ndarray, rows: int, num_steps: int, seed: int, skip: int
) -> Iterator[np.ndarray]:
    """Row numbers of each batch from number `skip` on: every row once each time round, rows of one length together."""
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
