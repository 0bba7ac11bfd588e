"""`amusd doctor`: whether a pair works on this machine: versions, devices, links, memory, exactness."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from importlib import metadata
from typing import TypeAlias

import torch

from amusd.checkpoints.building import device_errors
from amusd.checkpoints.configuration import layer_windows
from amusd.checkpoints.loading import check_target, describe_drafter, describe_target, load_target, target_settings
from amusd.checkpoints.settled import settle
from amusd.checkpoints.tokenizer import user_turn
from amusd.commands.bench import beside, measure_links, one_pass, time_in_turns
from amusd.commands.job import Job
from amusd.config import EngineConfig
from amusd.drafters.factory import load_drafters
from amusd.errors import AmusdError, ConfigError
from amusd.runner.fallback import find_way
from amusd.runner.model_runner import ModelRunner
from amusd.runner.self_test import measure_width_invariance
from amusd.runtime.cores import allowed_cores
from amusd.runtime.devices import check_devices, claim_device, count_gpus, devices_of, free_bytes, link_devices, sharing
from amusd.runtime.workers import check_folders, check_ranks
from amusd.transport.factory import ON_ONE_MACHINE, link_address, listen

PACKAGES = ("amusd", "torch", "transformers", "pyzmq", "hydra-core", "gguf", "starlette", "uvicorn")
SELF_TEST_PROMPT = "Count from one to thirty, with the words and the numbers, and say which of them are prime numbers."
SELF_TEST_TOKENS = 32
_MARKS = {True: "ok", False: "FAIL", None: ""}
_NOTICEABLE = 1.1
"""A finding warns if the draft slows a pass by this factor."""
_COSTLY = 1.3
"""A finding warns if two rows take this many times as long as one row."""

Finding: TypeAlias = tuple[str, bool | None, str]
"""A line of the report: name, whether all is well (None: neither good nor bad), and text."""


def run(job: Job) -> int:
    """Check what the configuration needs, and print findings; return 0 if everything works, else 2."""
    findings, drafter = [], job.config.drafter
    drafter.require(drafter.address is None, "address", "`amusd doctor` looks at this machine")
    for name, ok, text in _findings(job.config.engine_for("doctor")):
        findings.append({"name": name, "ok": ok, "text": text})
        job.console.text(f"{_MARKS[ok]:<4}  {name:<18}  {text}")
    healthy = all(finding["ok"] is not False for finding in findings)
    job.console.document({"ok": healthy, "findings": findings})
    return 0 if healthy else 2


def _findings(config: EngineConfig) -> Iterator[Finding]:
    machine = [*_guard("devices", _machine(config))]
    yield from machine
    has_devices = machine[-1][1] is not False
    if not has_devices:  # all else is checked on the CPU
        hardware = replace(config.hardware, devices=("cpu", "cpu"), num_threads=1)
        config = replace(config, hardware=hardware, target_tensor_parallel_size=1)
    yield from _guard("transport", _links(config))
    yield from _guard("models", _models(config, has_devices=has_devices))


def _guard(name: str, findings: Iterator[Finding]) -> Iterator[Finding]:
    try:
        yield from findings
    except AmusdError as error:
        yield name, False, str(error)


def _machine(config: EngineConfig) -> Iterator[Finding]:
    found = {name: next(iter(metadata.distributions(name=name)), None) for name in PACKAGES}
    versions = (f"{name} {'missing' if package is None else package.version}" for name, package in found.items())
    yield "versions", None, ", ".join([f"Python {platform.python_version()}", *versions])
    check_ranks(config)
    check_devices(devices_of(config))
    with device_errors("cuda"):
        gpus = [torch.cuda.get_device_name(number) for number in range(count_gpus())]
    devices = devices_of(config)
    text = f"GPUs: {', '.join(gpus) or 'none'}; {len(allowed_cores())} CPU cores; "
    names = [*(f"rank {rank} of the target" for rank in range(config.target_tensor_parallel_size)), "the draft"]
    text += ", ".join(f"{name} on {device}" for name, device in zip(names, devices, strict=True))
    shared = sharing(config, devices)
    if devices.count("cpu") * config.hardware.num_threads > len(allowed_cores()):
        shared = "too few cores for all"
    yield "devices", None if shared else True, f"{text}; {shared}: they slow each other" if shared else text


def _links(config: EngineConfig) -> Iterator[Finding]:
    wanted = config.transport
    links = ON_ONE_MACHINE if wanted.address is None else {wanted.address.partition("://")[0]: wanted}
    needed = {name for name, link in links.items() if wanted.address or link.kind in ("zeromq", wanted.kind)}
    for name, taken in measure_links(links, config.hardware, num_messages=400):
        if "unavailable" in taken:
            yield f"link {name}", False if name in needed else None, taken["unavailable"]
        else:
            text = "{one_way_us_p50:.0f} us one way to a process, {one_way_us_p99:.0f} us at the 99th percentile"
            long = "; {long_one_way_us_p50:.0f} us for 64 KiB from GPU to GPU" if "long_one_way_us_p50" in taken else ""
            yield f"link {name}", True, f"{text}{long}".format(**taken)
    devices = link_devices(config)
    with link_address(wanted, devices) as address, closing(listen(wanted, address, devices=devices)) as made:
        yield "transport", True, made.address


def _models(config: EngineConfig, *, has_devices: bool = True) -> Iterator[Finding]:
    of_target, of_draft = link_devices(config)
    check_folders(config)
    check_target(config)
    if not has_devices:
        yield "models", None, "their folders can be read; all else needs the devices"
        return
    if config.target_tensor_parallel_size > 1:
        yield "target", None, "its ranks can share it; their memory and their exactness are not measured here"
        return
    torch.set_num_threads(config.hardware.num_threads)
    device = claim_device(config, "target")
    config = settle(config, device)
    drafters = load_drafters(config, of_draft)  # first: a mistake is reported before the target's weights are read
    model, tokenizer = load_target(config, device)
    yield "target", True, f"{describe_target(config, of_target)}, computed by {model.implementation}"
    if drafters.tokenizer_hash not in ("", tokenizer.fingerprint):
        raise ConfigError("the drafter's tokenizer differs from the target's")
    texts = (describe_drafter(drafter, config, of_draft) for drafter in config.drafters)
    yield "drafter", True, "; ".join([*texts, *drafters.notes])
    models: dict[str, list[ModelRunner]] = {of_target: [model]}
    models.setdefault(of_draft, []).extend(drafters.models)
    for device, own in models.items():
        yield _memory(config, device, own)
        for each in own if device != "cpu" else ():
            if each.capture is None:
                continue
            yield f"passes {device}", True, find_way(each, each.new_cache(min(each.max_length, 100)))
    yield from _windows(config, model)
    prompt = tokenizer.encode_chat(user_turn(SELF_TEST_PROMPT))
    needed = len(prompt) + max(SELF_TEST_TOKENS, config.max_verify_width)
    if needed > model.max_length:
        yield "exactness", None, f"not measured: needs room for {needed} tokens (max_model_len)"
        return
    yield _exactness(config, model, prompt)
    yield from _passes(config, model, prompt)


def _memory(config: EngineConfig, device: str, models: Sequence[ModelRunner]) -> Finding:
    weights, free = sum(model.weight_bytes for model in models), free_bytes(device)
    caches = sum(model.cache_bytes(config.max_num_seqs) for model in models)
    text = f"a pass reads {weights / 1e6:.0f} MB, caches (max_num_seqs) take {caches / 1e6:.0f} of {free / 1e6:.0f} MB"
    return f"memory {device}", caches <= free, text


def _windows(config: EngineConfig, model: ModelRunner) -> Iterator[Finding]:
    """The memory that caches waste on positions outside the layers' windows."""
    windows, length = layer_windows(target_settings(config)), model.max_length
    unseen = [max(0, length - (window or length)) for window in windows]
    if any(unseen):
        seen, share = length - max(unseen), sum(unseen) / (len(windows) * length)
        text = f"{sum(map(bool, unseen))} of {len(windows)} layers see {seen} of {length} tokens; caches keep all"
        megabytes = share * model.cache_bytes(config.max_num_seqs) / 1e6
        yield "windows", None, f"{text}, about {megabytes:.0f} MB more than these layers need"


def _exactness(config: EngineConfig, model: ModelRunner, prompt: Sequence[int]) -> Finding:
    found = measure_width_invariance(model, prompt, SELF_TEST_TOKENS, num_caches=config.max_num_seqs)
    text = f"{found.count(0.0)} of {len(found)} rows have the same bits in any batch"
    ok = not any(found) if config.verify_width == "fixed" else None
    return "exactness", ok, f"{text} (verify_width={config.verify_width})"


def _passes(config: EngineConfig, model: ModelRunner, prompt: Sequence[int]) -> Iterator[Finding]:
    """How much a second row costs, and how much a busy draft device slows a pass of the target."""
    passes = {str(rows): one_pass(model, prompt, rows) for rows in (1, 2, config.max_verify_width)}
    with beside(config) as busy:
        alone, slowed = time_in_turns(passes, nullcontext, busy)
    text = f"a pass of {', '.join(alone)} rows takes {', '.join(f'{ms:.1f}' for ms in alone.values())} ms"
    share, cost = alone["2"] / alone["1"], ""
    if share > _COSTLY:
        cost = f": two rows take {share:.1f} times one, so wrong candidates cost"
    yield "rows", None if cost else True, text + cost
    text = f"a pass takes {alone['1']:.1f} ms, and {slowed['1']:.1f} while the draft's device computes"
    cost, share = "running ahead costs the target little", slowed["1"] / alone["1"]
    if share >= _NOTICEABLE:
        cost = f"running ahead gains less, by up to {share:.2f} times"
    yield "neighbour", None if share >= _NOTICEABLE else True, f"{text}: {cost}"
