"""Asynchronous speculative decoding in one file, to be read from top to bottom.

    epoch    0                     1
    draft    a b c d e f g h i j k y z u v w q ...       one token a step, always ahead
             candidates |          ^ verdict: a b x
                        v          |
    target   [ -> a   ][bcde -> bx][ -> y   ][zuvw -> zuvwq ...       one pass after the other, over what has arrived

The draft, a small model on a device of its own, sends each token as a candidate. The target scores the candidates at
hand in one pass. It commits the candidates that equal its own choices, and its own next token; without candidates that
is plain decoding. Neither side waits, so the draft may write behind a rejected token (f to k). Epochs reveal this:

* The draft raises its epoch when a verdict contradicts its tail, which it throws away: a rollback.
* A candidate carries its epoch and its position. When the target's text contradicts it, the target's floor becomes
  max(floor, its epoch + 1). Candidates whose epoch is below the floor are dropped.
* A verdict is the whole committed prefix, so the newest alone is enough. Nothing is acknowledged.

So every candidate is verified behind exactly the prefix that it was drafted from. The text is that of the target alone
(`--plain`), whatever the draft does, except where two tokens nearly tie: a pass over several tokens rounds differently
from a pass over one, so either may be chosen.

    python examples/nano.py "Why is the sky blue?"                                 # with the pair that amusd brings
    python examples/nano.py --target FOLDER --draft FOLDER "Why is the sky blue?"

The method is AMUSD's (arXiv 2410.17375); PEARL (2408.11850) and SSD (2603.03251) are relatives. "In amusd" marks
features of the package beyond this file.
"""

import argparse
import atexit
import contextlib
import multiprocessing
import os
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, TextStreamer
from transformers.utils import logging

LOOKAHEAD = 16  # tokens that the draft may be ahead of the committed prefix
DEADLINE = 120.0  # seconds that one side waits for the other: the target at the start, the draft when its tail is full


class Candidate(NamedTuple):
    """Draft to target: `token` may stand at `position`. In amusd: a tree of tokens, with a hash of its prefix."""

    epoch: int
    position: int
    token: int


class Verdict(NamedTuple):
    """Target to draft: all that is committed, at first the prompt. In amusd: the tokens that the draft may lack."""

    committed: list[int]


def agreement(ours: list[int], theirs: list[int]) -> int:
    """Return the number of tokens before the first difference, or before the end of the shorter text."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((index for index, (our, their) in pairs if our != their), min(len(ours), len(theirs)))


class Model:
    """A model and its KV cache. In amusd: many sequences a pass, CUDA graphs, tensor parallelism."""

    def __init__(self, folder: str, device: str, dtype: str) -> None:
        logging.disable_progress_bar()
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))  # on CPUs half of the cores are a device
        self.network = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).to(device).eval()
        self.cache = DynamicCache()
        self.cached: list[int] = []  # the text that the cache holds

    @torch.inference_mode()
    def choices(self, text: list[int], count: int) -> list[int]:
        """Return the greedy choice behind each of the last `count` tokens of `text`, from one pass."""
        keep = min(agreement(self.cached, text), len(text) - count)
        if keep < len(self.cached):
            self.cache.crop(keep - len(self.cached))  # rollback: minus the number of tokens to drop
        new = torch.tensor([text[keep:]], device=self.network.device)  # [1, new tokens]
        scores = self.network(new, past_key_values=self.cache, logits_to_keep=count).logits  # [1, count, vocabulary]
        self.cached = text
        return scores[0].argmax(-1).tolist()


class Draft:
    """The draft's text: [0, base) is committed as far as the draft knows, the rest is its tail."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.text: list[int] = []
        self.base = self.epoch = 0

    @property
    def may_draft(self) -> bool:
        """Whether the tail has room. In amusd: and whether the next token is likely enough to be needed."""
        return 0 < len(self.text) < self.base + LOOKAHEAD

    def hear(self, verdict: Verdict) -> None:
        """Keep the tail if the verdict agrees with it. In amusd: the tree may hold the other token, too."""
        self.base = len(verdict.committed)
        agreed = agreement(self.text, verdict.committed)
        if agreed < self.base:
            self.epoch += agreed < len(self.text)  # a rollback, unless the draft is only behind
            self.text = verdict.committed

    def step(self) -> Candidate:
        """Draft one token. In amusd: EAGLE, Medusa, DFlash, prompt lookup and others as well."""
        self.text = self.text + self.model.choices(self.text, 1)
        return Candidate(self.epoch, len(self.text) - 1, self.text[-1])


def run_draft(link: Connection, folder: str, device: str, dtype: str) -> None:
    """Run the draft until the target ends. In amusd: a lost draft is started again."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the target, which ends the draft
    draft = Draft(Model(folder, device, dtype))
    with contextlib.suppress(EOFError, OSError):
        while draft.may_draft or link.poll(DEADLINE):
            if link.poll():
                draft.hear(link.recv())
            else:
                link.send(draft.step())


class Target:
    """The committed text, which only grows, and the candidates at hand behind it, all of one epoch."""

    def __init__(self, model: Model, prompt: list[int], max_new_tokens: int) -> None:
        self.model = model
        self.committed = prompt
        self.max_length = len(prompt) + max_new_tokens
        ends = model.network.generation_config.eos_token_id
        self.ends = ends if isinstance(ends, list) else [ends]
        self.candidates: list[int] = []
        self.epoch = self.floor = 0
        self.passes = self.accepted = self.rollbacks = 0

    def receive(self, candidate: Candidate) -> None:
        """Put a candidate behind those at hand, or compare it with the token that was committed in its place."""
        if candidate.epoch < self.floor:
            return
        self.epoch = candidate.epoch
        if candidate.position >= len(self.committed):
            assert candidate.position == len(self.committed) + len(self.candidates)  # the link keeps the order
            self.candidates.append(candidate.token)
        elif candidate.token != self.committed[candidate.position]:
            self.contradict()

    def verify(self) -> list[int]:
        """Verify the candidates at hand in one pass, and commit. In amusd: waits for more; trees; exact sampling."""
        candidates = self.candidates[: self.max_length - len(self.committed) - 1]
        choices = self.model.choices(self.committed + candidates, len(candidates) + 1)
        accepted = agreement(candidates, choices)
        ends = (index for index in range(accepted) if choices[index] in self.ends)
        tokens = choices[: next(ends, accepted) + 1]
        self.passes += 1
        self.accepted += min(accepted, len(tokens))
        self.committed, self.candidates = self.committed + tokens, []
        if accepted < len(candidates):
            self.contradict()
        return tokens

    def contradict(self) -> None:
        """Drop all candidates of this epoch: those at hand now, later arrivals by the floor."""
        self.candidates = []
        self.floor = max(self.floor, self.epoch + 1)
        self.rollbacks += 1


def exchange(link: Connection, target: Target) -> Connection | None:
    """Send and receive; return None once the draft is lost. In amusd: the link may lose, repeat and reorder."""
    with contextlib.suppress(EOFError, OSError):
        if select.select([], [link], [], 0)[1]:  # a full link gets nothing: the next verdict says it all
            link.send(Verdict(target.committed))
        while link.poll():
            target.receive(link.recv())
        return link
    print("the draft is lost, the target goes on alone", file=sys.stderr)
    return None


@contextlib.contextmanager
def draft_process(folder: str, device: str, dtype: str) -> Iterator[Connection]:
    """Start a draft's process and yield the link to it. In amusd: draft and target may be on two machines."""
    context = multiprocessing.get_context("spawn")
    link, far_end = context.Pipe()
    process = context.Process(target=run_draft, args=(far_end, folder, device, dtype), daemon=True)
    process.start()
    far_end.close()  # each end is now open in one process only, and closes with it
    try:
        yield link
    finally:
        link.close()  # which ends the draft
        process.join(timeout=5)
        process.kill()


def decode(target: Target, link: Connection | None) -> Iterator[list[int]]:
    """Yield the tokens of each pass. Without a link there is never a candidate: plain decoding."""
    while len(target.committed) < target.max_length and target.committed[-1] not in target.ends:
        link = link and exchange(link, target)
        yield target.verify()


def encode(tokenizer: Any, prompt: str) -> list[int]:
    """Return the tokens of a prompt, which is a user's turn if the model has a chat template."""
    if tokenizer.chat_template:
        turn = {"role": "user", "content": prompt}
        prompt = tokenizer.apply_chat_template([turn], tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(prompt, add_special_tokens=not tokenizer.chat_template)


def embedded_pair() -> tuple[str, str]:
    """Return the folders of amusd's own pair; only this function uses the package."""
    from amusd.checkpoints import embedded_draft, embedded_target

    target, folder = embedded_target.embedded_target_path(), tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    embedded_draft.export_draft(target, Path(folder))
    return str(target), folder


def main() -> None:
    """Answer one prompt."""
    parser = argparse.ArgumentParser(description="Asynchronous speculative decoding in one file.")
    parser.add_argument("prompt")
    parser.add_argument("--target", metavar="FOLDER")
    parser.add_argument("--draft", metavar="FOLDER", help="a smaller model with the same tokenizer")
    parser.add_argument("--devices", nargs=2, default=["cpu", "cpu"], metavar=("TARGET", "DRAFT"), help="cuda:0 cuda:1")
    parser.add_argument("--dtype", default="float32", help="float32 (default), bfloat16 or float16")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--plain", action="store_true", help="decode with the target alone")
    given = parser.parse_args()
    if not given.target or not (given.draft or given.plain):
        if given.target or given.draft:
            parser.error("name both folders, --target and --draft, or none")
        given.target, given.draft = embedded_pair()

    tokenizer = AutoTokenizer.from_pretrained(given.target)
    prompt, streamer = encode(tokenizer, given.prompt), TextStreamer(tokenizer, skip_special_tokens=True)
    start_draft = contextlib.nullcontext() if given.plain else draft_process(given.draft, given.devices[1], given.dtype)
    with start_draft as draft:
        target = Target(Model(given.target, given.devices[0], given.dtype), prompt, given.max_new_tokens)
        link = draft and exchange(draft, target)  # the first verdict is the prompt
        if link:
            link.poll(DEADLINE)  # until the first candidate shows that the draft is ready
        start = time.perf_counter()
        for tokens in decode(target, link):
            streamer.put(torch.tensor(tokens))
        seconds = time.perf_counter() - start
    streamer.end()
    count = len(target.committed) - len(prompt)
    counts = f"{target.passes} target passes, {target.accepted} accepted, {target.rollbacks} rollbacks"
    print(f"{count} tokens, {count / seconds:.1f} tokens/s, {counts}", file=sys.stderr)


if __name__ == "__main__":
    main()
