"""`amusd doctor`: what this machine has, what will and will not work here, and why."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

from amusd.config import DrafterConfig, EngineConfig, HardwareConfig, RunConfig, TransportConfig
from amusd.console import Console
from amusd.drafters.factory import LoadedDrafters, load_drafters
from amusd.errors import AmusdError
from amusd.models.loading import (
    check_drafter,
    check_target,
    draft_dtype,
    load_target,
    target_dtype,
)
from amusd.models.self_test import measure_width_invariance
from amusd.models.tokenizer import Tokenizer, user_turn
from amusd.runtime.cores import allowed_cores, cores_for, speed_beside
from amusd.runtime.devices import check_devices, claim_device, count_gpus, device_of, devices_of
from amusd.runtime.placement import rank_layout, sharing
from amusd.runtime.startup import describe_capacity, link_devices
from amusd.transport.factory import ON_ONE_MACHINE, choose_here
from amusd.transport.latency import measure_one_way
from amusd.types import Role

PACKAGES = ("amusd", "torch", "transformers", "pyzmq", "hydra-core", "gguf", "fastapi", "uvicorn")
SELF_TEST_TOKENS = 32
SELF_TEST_PROMPT = "Count from one to thirty, with the words and the numbers, and say which of them are prime numbers."
LINK_MESSAGES = 400
APART = 0.8
"""Least share of its speed that a core keeps beside another one where the two count as apart."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `ok` None: neither good nor bad."""

    name: str
    ok: bool | None
    text: str


def run_doctor(config: RunConfig, console: Console) -> int:
    """Look at everything the configuration needs; print the report. Returns 0 when all of it works, else 2.

    Raises `ConfigError` for a GPU that is not there.
    """
    engine = config.engine()
    check_devices(devices_of(engine))
    findings: list[Finding] = []
    for look in (_versions, _devices, _links, _pair):
        for finding in look(engine):
            findings.append(finding)
            mark = {True: "ok  ", False: "FAIL", None: "    "}[finding.ok]
            console.text(f"{mark}  {finding.name:<12}  {finding.text}")
    healthy = all(finding.ok is not False for finding in findings)
    console.document({"ok": healthy, "findings": [dataclasses.asdict(finding) for finding in findings]})
    return 0 if healthy else 2


def _versions(_config: EngineConfig) -> list[Finding]:
    versions = ", ".join(f"{package} {_version(package)}" for package in PACKAGES)
    return [Finding("versions", None, f"Python {platform.python_version()}, {versions}")]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"


def _devices(config: EngineConfig) -> list[Finding]:
    places = devices_of(config)
    cores = allowed_cores()
    return [
        Finding("devices", None, f"{count_gpus()} GPUs; {len(cores)} CPU cores for this process"),
        _placement(config, places, len(cores)),
        *_core_speed(config, places, cores),
    ]


def _placement(config: EngineConfig, places: Sequence[str], num_cores: int) -> Finding:
    """The device of each rank; neither good nor bad where ranks share one."""
    names = _rank_names(config)
    text = ", ".join(f"{name} on {_place(place)}" for name, place in zip(names, places, strict=True))
    if set(places) != {"cpu"}:
        shared = sharing(config, places)
        return Finding("placement", *((True, text) if shared is None else (None, f"{text}: docs/one_gpu.md")))
    if num_cores < len(places) * config.hardware.num_threads:
        them = "both, so the two" if len(places) == 2 else "all, so they"
        return Finding("placement", None, f"{text}: too few cores for {them} will slow each other")
    return Finding("placement", True, f"{text}, a core each")


def _core_speed(config: EngineConfig, places: Sequence[str], cores: list[int]) -> list[Finding]:
    """Whether the cores of a pair on CPUs are cores: two hardware threads of one look like two to the system."""
    of_pair = [min(cores_for(role, cores, config.hardware), default=None) for role in Role]
    target, draft = of_pair
    if set(places) != {"cpu"} or target is None or draft is None:
        return []
    kept = speed_beside(target, draft)
    text = f"while both compute, each has {100 * kept:.0f} % of the speed that it has alone"
    if kept >= APART:
        return [Finding("cores", True, text)]
    text += ": two threads of one core, or other work; a draft that runs ahead slows its target"
    return [Finding("cores", None, text)]


def _place(device: str) -> str:
    return device if device == "cpu" else f"{device} ({torch.cuda.get_device_name(device)})"


def _rank_names(config: EngineConfig) -> list[str]:
    """The role of each rank, in the order of `devices_of`."""
    if config.num_ranks == 2:
        return ["target", "draft"]
    several = config.draft_tensor_parallel_size > 1
    return [
        f"rank {number} ({f'{entry}' if several and entry.role is Role.DRAFT else entry.role.value})"
        for number, entry in enumerate(rank_layout(config))
    ]


def _links(config: EngineConfig) -> list[Finding]:
    wanted = config.transport
    taken = _try("transport", lambda: _taken(config))
    if wanted.address is not None:
        return [_link(f"link {wanted.address.partition('://')[0]}", wanted, config.hardware), taken]
    links = {
        "link shm": ON_ONE_MACHINE["shared_memory"],
        "link ipc": ON_ONE_MACHINE["zeromq"],
        "link tcp": ON_ONE_MACHINE["zeromq_tcp"],
        "link gloo": ON_ONE_MACHINE["gloo"],
        "link nccl": ON_ONE_MACHINE["nccl"],
    }
    findings = []
    for name, link in links.items():
        finding = _link(name, link, config.hardware)
        if not finding.ok and link.kind != "zeromq" and wanted.kind != link.kind:
            finding = dataclasses.replace(finding, ok=None)  # there are others to take
        findings.append(finding)
    return [*findings, taken]


def _taken(config: EngineConfig) -> str:
    choice = choose_here(config.transport, link_devices(config))
    return f"{choice.link}: {choice.reason}"


def _link(name: str, transport: TransportConfig, hardware: HardwareConfig) -> Finding:
    def measure() -> str:
        allowed = allowed_cores()
        cores = cores_for(Role.TARGET, allowed, hardware), cores_for(Role.DRAFT, allowed, hardware)
        taken = measure_one_way(transport, num_messages=LINK_MESSAGES, cores=cores)
        return (
            f"{transport.kind}: {taken.p50_us:.0f} us one way between two processes, {taken.p99_us:.0f} us at the 99th"
            " percentile"
        )

    return _try(name, measure)


def _pair(config: EngineConfig) -> list[Finding]:
    loaded: list[tuple[Any, Tokenizer]] = []
    drafts: list[LoadedDrafters] = []

    def target() -> str:
        torch.set_num_threads(config.hardware.num_threads)
        device = claim_device(config, Role.TARGET)
        check_target(config, device)  # refuses what ranks cannot share, too
        model, tokenizer = load_target(config, device)
        loaded.append((model, tokenizer))
        kind = config.target.kind if config.hardware.synthetic is None else "synthetic"
        name = config.hardware.synthetic or config.target.model or "SmolLM2-135M-Instruct"
        return f"{kind} {name}: {target_dtype(config, device)}, {model.implementation}'s forward pass"

    def drafters() -> str:
        device = device_of(config, Role.DRAFT)
        texts = [_drafter_text(drafter, config, device) for drafter in config.drafters]
        draft = load_drafters(config, device)
        drafts.append(draft)
        if loaded and draft.tokenizer_hash not in ("", loaded[0][1].fingerprint):
            raise AmusdError("the drafter's tokenizer differs from the target's")
        return "; ".join([*texts, *draft.notes])

    findings = [_try("target", target), _try("drafter", drafters)]
    findings += [_schedules(config, draft) for draft in drafts]
    if loaded:
        findings.append(_exactness(*loaded[0], fixed=config.verify_width == "fixed"))
        findings.append(Finding("answers", None, describe_capacity(loaded[0][0], config.max_num_seqs)))
    return findings


def _schedules(config: EngineConfig, draft: LoadedDrafters) -> Finding:
    """The modes and policies that each drafter can keep to."""
    chains, trees = draft.names(drafts_trees=False), draft.names(drafts_trees=True)
    texts = []
    for drafter in config.drafters:
        can = dataclasses.replace(drafter.can, chain=drafter.kind in chains, tree=drafter.kind in trees)
        texts.append(f"{drafter.kind}: {can.schedules}")
    return Finding("schedules", None, "; ".join(texts))


def _drafter_text(drafter: DrafterConfig, config: EngineConfig, device: str) -> str:
    if drafter.kind == "cascade":
        middle, inner = (_drafter_text(stage, config, device) for stage in drafter.stages)
        number = drafter.num_inner_tokens
        return f"cascade: up to {number} tokens of {inner}; judged in one pass by {middle}"
    check_drafter(drafter, config, device)
    if not (drafter.can.has_model or drafter.can.needs_features):
        return drafter.kind if drafter.factory is None else f"{drafter.kind} {drafter.factory}"
    name = drafter.kind if drafter.num_layers is None else f"{drafter.kind} (first {drafter.num_layers} layers)"
    return f"{name}: {draft_dtype(drafter, device, config.hardware.synthetic)}"


def _exactness(model: Any, tokenizer: Tokenizer, *, fixed: bool) -> Finding:
    outcome = measure_width_invariance(model, tokenizer.encode_chat(user_turn(SELF_TEST_PROMPT)), SELF_TEST_TOKENS)
    text = (
        f"{outcome.num_equal} of {outcome.num_rows} rows equal bit for bit in blocks of 1 to 8 rows"
        f", beside other sequences{' and other paths' if outcome.num_rows > 2 * SELF_TEST_TOKENS else ''}"
        f" (largest difference {outcome.max_difference:.2g})"
    )
    if not fixed:
        return Finding("exactness", None, f"verify_width=bucketed: {text}; answers may differ at ties")
    return Finding("exactness", outcome.holds, f"verify_width=fixed: {text}")


def _try(name: str, look: Callable[[], str]) -> Finding:
    try:
        return Finding(name, True, look())
    except AmusdError as error:
        return Finding(name, False, str(error))
