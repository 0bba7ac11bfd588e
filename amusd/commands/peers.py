"""Other engines on the devices of a pair, each in a process of its own: for `amusd compare compare.equal_devices=true`.

    ranks      one engine with all devices on each pass: on GPUs a rank of the target on each of them, where a draft
               uses those of the pair's draft in between; on CPUs threads on all of the pair's cores
    replicas   an engine on each device, with a draft that takes turns with the target there

What the two ends say to each other, each a line of JSON over a socket that is the child's standard input:

    parent: settings, once (configuration, cores, folder for socket files); then one load after another
    child:  {"ready": true}; for each load {"answers", "seconds"}; in the place of any {"failure": a line}

The child ends with the parent, and its own children with it.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from typing_extensions import Self

from amusd.answer import Generation
from amusd.child import command_of
from amusd.child.fork_server import Channel, Orders, ignore_terminal
from amusd.commands.contestants import Contestant, Layout, count_devices
from amusd.commands.generate import in_flight
from amusd.config import DecodingConfig, EngineConfig, SamplingParams, TransportConfig
from amusd.engine import Engine
from amusd.errors import AmusdError, ConfigError, PeerFailedError, first_line
from amusd.runtime.cores import cores_for, cores_of_parent, pin_to
from amusd.runtime.devices import devices_of
from amusd.runtime.startup import make_recorder
from amusd.runtime.supervisor import DraftProcess
from amusd.settings import from_mapping, to_mapping
from amusd.tracing.events import NO_SEQUENCE
from amusd.tracing.metrics import DraftCounts, GenerationMetrics
from amusd.types import FinishReason, Mode, Role

_EXIT_SECONDS = 5.0
"""How long an engine may take to end by itself before it is killed."""


@dataclass(frozen=True, slots=True)
class Load:
    """Prompts for a contestant, as many at a time as its batch size."""

    contestant: Contestant
    prompts: Sequence[Sequence[int]]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers to a load, in its order."""

    generations: list[Generation]
    seconds: float
    """Time from the first request to the last token."""


def answer_load(engine: Engine, load: Load) -> Answers:
    """Answer the prompts of a load."""
    contestant = load.contestant
    asked = partial(engine.submit, decoding=contestant.decoding, drafter=contestant.drafter)
    submitted = ((number, asked(prompt, load.params)) for number, prompt in enumerate(load.prompts))
    begin = time.perf_counter()
    answers = dict(in_flight(engine, submitted, contestant.batch_size))
    generations = [answers[number].result() for number in range(len(load.prompts))]
    return Answers(generations, max(answer.all_tokens_at or begin for answer in answers.values()) - begin)


class Peer:
    """The parent's end of another engine."""

    def __init__(self, config: EngineConfig, cores: Sequence[int]) -> None:
        """Start it; does not wait. `cores`: those it keeps to; none: those of this process."""
        self._channel, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(command_of(__name__), stdin=theirs.fileno(), stdout=subprocess.DEVNULL)
        self._replies = self._channel.makefile(encoding="utf-8")
        self._timeout = config.startup_timeout_seconds
        self._say({"config": to_mapping(config), "cores": list(cores), "folder": tempfile.gettempdir()})

    def await_ready(self) -> None:
        """Wait until its models are loaded. Raises `PeerFailedError`, also after `startup_timeout_seconds`."""
        self._channel.settimeout(self._timeout)
        self._reply()
        self._channel.settimeout(None)

    def begin(self, load: Load) -> None:
        """Have it answer a load; does not wait."""
        contestant = load.contestant
        self._say(
            {
                "decoding": to_mapping(contestant.decoding),
                "drafter": contestant.drafter,
                "batch_size": contestant.batch_size,
                "params": to_mapping(load.params),
                "prompts": [list(prompt) for prompt in load.prompts],
            }
        )

    def end(self) -> Answers:
        """Wait for its answers. Raises `PeerFailedError` when it has ended."""
        reply = self._reply()
        return Answers([_generation(values) for values in reply["answers"]], reply["seconds"])

    def close(self) -> None:
        """End it."""
        with suppress(OSError):
            self._channel.shutdown(socket.SHUT_WR)
        try:
            self._process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._replies.close()
        self._channel.close()

    def _say(self, values: Orders) -> None:
        with suppress(OSError):  # it has ended, which its reply tells
            self._channel.sendall(json.dumps(values).encode() + b"\n")

    def _reply(self) -> dict[str, Any]:
        try:
            line = self._replies.readline()
        except TimeoutError:
            raise PeerFailedError(f"another engine did not load in {self._timeout:g} seconds") from None
        except OSError:
            line = ""
        reply: dict[str, Any] = (
            json.loads(line) if line else {"failure": f"another engine, process {self._process.pid}, has ended"}
        )
        if "failure" in reply:
            raise PeerFailedError(reply["failure"])
        return reply


class Peers:
    """The engines of each layout besides the pair."""

    def __init__(self) -> None:
        self._of_layout: dict[Layout, list[Peer]] = {}
        self._running = ExitStack()

    @classmethod
    def start(cls, config: EngineConfig, note: Callable[[str], None]) -> Self:
        """Start all that fit, and wait for them. `note` gets a line for each layout that is left out, and why.

        Raises `ConfigError` where the pair's ranks have no devices of their own, all alike.
        """
        found = cls()
        plans = layouts_of(config, cores_of_parent())
        if "replicas" not in plans:
            note("compare.equal_devices: no replicas, since one of them needs as many devices as the target has ranks")
        with ExitStack() as running:
            for layout, engines in plans.items():
                peers = [Peer(*engine) for engine in engines]
                for peer in peers:
                    running.callback(peer.close)
                try:
                    for peer in peers:
                        peer.await_ready()
                except PeerFailedError as error:
                    note(f"compare.equal_devices: left out {layout}: {error}")
                    for peer in peers:
                        peer.close()
                else:
                    found._of_layout[layout] = peers
            found._running = running.pop_all()
        return found

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Those that can be measured."""
        return tuple(self._of_layout)

    def answer(self, engine: Engine, load: Load) -> Answers:
        """Answer a load: `engine` where the contestant's layout is a pair, else the engines that there are for it.

        Several answer the load at the same time, each all of it; the slowest stands for them.
        """
        if load.contestant.layout == "pair":
            return answer_load(engine, load)
        peers = self._of_layout[load.contestant.layout]
        for peer in peers:
            peer.begin(load)
        return max((peer.end() for peer in peers), key=lambda answers: answers.seconds)

    def close(self) -> None:
        """End all of them."""
        self._running.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def layouts_of(config: EngineConfig, allowed: list[int]) -> dict[Layout, list[tuple[EngineConfig, list[int]]]]:
    """Return the engines of each layout and their cores, on the devices and cores of the pair that `config` is for.

    `allowed`: the cores that the pair could choose from. Raises `ConfigError` where the ranks of the pair have no
    devices of their own, all alike.
    """
    devices, hardware, num_target_ranks = devices_of(config), config.hardware, config.target_tensor_parallel_size
    on_cpu = set(devices) == {"cpu"}
    if count_devices(devices) < config.num_ranks or (not on_cpu and "cpu" in devices):
        raise ConfigError(
            f"compare.equal_devices=true: not with hardware.devices={list(devices)}; it compares uses of devices that "
            "are alike, one for each rank"
        )
    ranks = [*((Role.TARGET, rank) for rank in range(num_target_ranks)), (Role.DRAFT, 0)]
    cores = [
        sorted(cores_for(role, allowed, hardware, rank=rank, num_target_ranks=num_target_ranks)) if on_cpu else []
        for role, rank in ranks
    ]
    config = replace(config, transport=TransportConfig())

    def single(device: str, num_threads: int) -> EngineConfig:
        """One rank of the target, and one of the draft on the same device."""
        used = replace(hardware, devices=(device, device), num_threads=num_threads, pin_cores=False)
        return replace(config, target_tensor_parallel_size=1, hardware=used)

    if on_cpu:
        together = single("cpu", hardware.num_threads * len(ranks))
    else:
        used = replace(hardware, devices=(*devices, devices[-1]))
        together = replace(config, target_tensor_parallel_size=len(ranks), hardware=used)
    found: dict[Layout, list[tuple[EngineConfig, list[int]]]] = {"ranks": [(together, sorted(set().union(*cores)))]}
    if num_target_ranks == 1:
        found["replicas"] = [
            (single(device, hardware.num_threads), own) for device, own in zip(devices, cores, strict=True)
        ]
    return found


def main() -> None:
    """The child's whole life."""
    ignore_terminal()
    channel = Channel()
    orders = channel.orders()
    settings = next(orders, None)
    if settings is None:
        return
    channel.on_hang_up(lambda: os._exit(0))  # nobody is left to answer to
    pin_to(set(settings["cores"]))
    tempfile.tempdir = settings["folder"]
    try:
        with _start(from_mapping(EngineConfig, settings["config"]), settings["cores"]) as engine:
            channel.report(ready=True)
            for each in orders:
                answers = answer_load(engine, _load(each))
                channel.report(answers=[_values(one) for one in answers.generations], seconds=answers.seconds)
    except Exception as error:
        channel.report(failure=first_line(error))
        if not isinstance(error, AmusdError):
            raise
        sys.exit(1)


def _start(config: EngineConfig, cores: Sequence[int]) -> Engine:
    if config.target_tensor_parallel_size == 1:
        return Engine.start(config)
    drafts = DraftProcess(config)  # which tells the target's other ranks, too
    drafts.followers.prepare(config, cores)
    return Engine.connect(config, drafts, make_recorder(Role.TARGET), process=drafts)


def _load(orders: Orders) -> Load:
    decoding = from_mapping(DecodingConfig, orders["decoding"])
    contestant = Contestant(decoding, orders["drafter"], orders["batch_size"])
    return Load(
        contestant, [tuple(prompt) for prompt in orders["prompts"]], from_mapping(SamplingParams, orders["params"])
    )


def _values(answer: Generation) -> dict[str, Any]:
    """An answer as JSON has it, without its log-probabilities; `_generation` is the inverse."""
    metrics, draft = answer.metrics, answer.metrics.draft
    counts = {
        "acceptance": [[*key, number] for key, number in metrics.acceptance.items()],
        "draft": None if draft is None else asdict(draft),
    }
    names = ("text", "token_ids", "finish_reason", "mode", "policy", "drafter", "seed")
    return {name: getattr(answer, name) for name in names} | {"metrics": vars(metrics) | counts}


def _generation(values: dict[str, Any]) -> Generation:
    metrics = values["metrics"]
    draft = metrics["draft"]
    counts = {
        "acceptance": Counter({(judged, accepted): number for judged, accepted, number in metrics["acceptance"]}),
        "draft": None if draft is None else DraftCounts(**draft),
    }
    fields = {
        "token_ids": tuple(values["token_ids"]),
        "finish_reason": FinishReason(values["finish_reason"]),
        "mode": Mode(values["mode"]),
        "metrics": GenerationMetrics(**metrics | counts),
    }
    return Generation(**values | fields, sequence_id=NO_SEQUENCE)
