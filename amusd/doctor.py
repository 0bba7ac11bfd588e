"""`amusd doctor`: what this machine has, what will and will not work here, and why."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

from amusd.config import EngineConfig, RunConfig, TransportConfig
from amusd.console import Console
from amusd.drafters.factory import load_drafters
from amusd.errors import AmusdError
from amusd.models.loading import load_target
from amusd.models.self_test import measure_width_invariance
from amusd.models.tokenizer import Tokenizer, user_turn
from amusd.protocol.messages import Shutdown
from amusd.runtime.cores import allowed_cores
from amusd.runtime.startup import device_of
from amusd.transport.base import Rendezvous
from amusd.transport.factory import connect, listen
from amusd.types import Role

PACKAGES = ("amusd", "torch", "transformers", "pyzmq", "hydra-core", "gguf")
SELF_TEST_TOKENS = 32
SELF_TEST_PROMPT = "Count from one to thirty, with the words and the numbers, and say which of them are prime numbers."
LINK_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `ok` None: neither good nor bad."""

    name: str
    ok: bool | None
    text: str


def run_doctor(config: RunConfig, console: Console) -> int:
    """Look at everything the configuration needs; print the report. Returns 0 when all of it works, else 1."""
    engine = config.engine()
    findings: list[Finding] = []
    for look in (_versions, _devices, _links, _pair):
        for finding in look(engine):
            findings.append(finding)
            mark = {True: "ok  ", False: "FAIL", None: "    "}[finding.ok]
            console.text(f"{mark}  {finding.name:<12}  {finding.text}")
    healthy = all(finding.ok is not False for finding in findings)
    console.document({"ok": healthy, "findings": [dataclasses.asdict(finding) for finding in findings]})
    return 0 if healthy else 1


def _versions(_config: EngineConfig) -> list[Finding]:
    versions = ", ".join(f"{package} {_version(package)}" for package in PACKAGES)
    return [Finding("versions", None, f"Python {platform.python_version()}, {versions}")]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"


def _devices(config: EngineConfig) -> list[Finding]:
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    allowed = len(allowed_cores())
    findings = [Finding("devices", None, f"{num_gpus} GPUs, {allowed} CPU cores for this process")]
    places = {role: device_of(config.hardware, role) for role in Role}
    text = ", ".join(f"{role.value} on {place}" for role, place in places.items())
    shared = len(set(places.values())) == 1
    if shared and "cpu" not in places.values():
        findings.append(Finding("placement", None, f"{text}: one GPU for both, so the two will slow each other"))
    elif shared and allowed < 2 * config.hardware.num_threads:
        findings.append(Finding("placement", None, f"{text}: too few cores for both, so the two will slow each other"))
    else:
        findings.append(Finding("placement", True, text + (", a core each" if shared else "")))
    return findings


def _links(config: EngineConfig) -> list[Finding]:
    addresses = [config.transport.address] if config.transport.address else [None, "tcp://127.0.0.1:0"]
    return [_link(dataclasses.replace(config.transport, address=address)) for address in addresses]


def _link(transport: TransportConfig) -> Finding:
    name = "zeromq ipc" if transport.address is None else f"zeromq {transport.address.partition('://')[0]}"

    def exchange() -> str:
        target = listen(transport, nonce=1)
        draft = connect(transport, Rendezvous(target.address, 1))
        try:
            draft.send(Shutdown())
            if target.receive(LINK_SECONDS) != Shutdown():
                raise AmusdError(f"a message did not arrive within {LINK_SECONDS:g} seconds")
            return f"a message crossed {target.address.partition('://')[0]}"
        finally:
            draft.close()
            target.close()

    return _try(name, exchange)


def _pair(config: EngineConfig) -> list[Finding]:
    loaded: list[tuple[Any, Tokenizer]] = []

    def target() -> str:
        torch.set_num_threads(config.hardware.num_threads)
        model, tokenizer = load_target(config, device_of(config.hardware, Role.TARGET))
        loaded.append((model, tokenizer))
        name = config.target.model or "SmolLM2-135M-Instruct"
        return f"{config.target.kind} {name}, {config.target.dtype}, through transformers"

    def drafters() -> str:
        draft = load_drafters(
            config.drafters, device=device_of(config.hardware, Role.DRAFT), max_model_len=config.max_model_len
        )
        if loaded and draft.tokenizer_hash not in ("", loaded[0][1].fingerprint):
            raise AmusdError("the drafter's tokenizer differs from the target's")
        return ", ".join(draft.factories)

    findings = [_try("target", target), _try("drafter", drafters)]
    if loaded:
        findings.append(_exactness(*loaded[0], fixed=config.verify_width == "fixed"))
    return findings


def _exactness(model: Any, tokenizer: Tokenizer, *, fixed: bool) -> Finding:
    outcome = measure_width_invariance(model, tokenizer.encode_chat(user_turn(SELF_TEST_PROMPT)), SELF_TEST_TOKENS)
    text = (
        f"{outcome.num_equal} of {outcome.num_rows} rows equal bit for bit in blocks of 1 to 8 rows"
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
