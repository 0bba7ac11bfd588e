"""Simulated GPUs: torch counts them, and code that starts CUDA too early fails the test."""

from __future__ import annotations

import pytest
import torch

OPENS_A_CONTEXT = ("is_available", "init", "current_device", "set_device", "mem_get_info", "get_device_properties")


def pretend_gpus(monkeypatch: pytest.MonkeyPatch, num_gpus: int, *, has_cuda: bool = True) -> None:
    """Make torch count this many GPUs, in a build with CUDA or without. Code that starts CUDA fails the test."""
    monkeypatch.setattr(torch.version, "cuda", "13.0" if has_cuda else None)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    for name in (*OPENS_A_CONTEXT, "_lazy_init"):
        monkeypatch.setattr(torch.cuda, name, _alarm(name))


def _alarm(name: str) -> object:
    def start_cuda(*_arguments: object) -> None:
        raise AssertionError(f"torch.cuda.{name} starts CUDA")

    return start_cuda
