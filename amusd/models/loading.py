"""From the configuration to a loaded model and its tokenizer."""

from __future__ import annotations

from amusd.config import DrafterConfig, EngineConfig, TargetConfig
from amusd.models.cached_model import CachedModel
from amusd.models.captured import Capture, capture_cuda_graph
from amusd.models.embedded_draft import load_embedded_draft
from amusd.models.huggingface import load_model
from amusd.models.numerics import Numerics
from amusd.models.tokenizer import HuggingFaceTokenizer, load_tokenizer
from amusd.models.zoo import Report, embedded_target_path

DRAFT_ROWS = 16
"""Most tokens that a drafter's model takes in at once after a rollback."""


def target_path(config: TargetConfig, report: Report | None = None) -> str:
    """Folder or hub name of the target's checkpoint; converts the embedded one when that has not been done."""
    return str(embedded_target_path(report=report)) if config.kind == "embedded" else str(config.model)


def target_numerics(config: EngineConfig, device: str) -> Numerics:
    """How target passes are cut and padded."""
    return Numerics.for_device(device, width=config.max_verify_width, fixed=config.verify_width == "fixed")


def capture_for(device: str, *, cuda_graphs: bool) -> Capture | None:
    """How passes on `device` are captured; None: not at all."""
    return capture_cuda_graph if cuda_graphs and device.startswith("cuda") else None


def load_target(
    config: EngineConfig, device: str, report: Report | None = None
) -> tuple[CachedModel, HuggingFaceTokenizer]:
    """The target's model and tokenizer on `device`. Raises `ConfigError` when there is no such model or device."""
    path = target_path(config.target, report)
    model = load_model(
        path,
        numerics=target_numerics(config, device),
        max_model_len=config.max_model_len,
        dtype=config.target.dtype,
        device=device,
        model_impl=config.target.model_impl,
        capture=capture_for(device, cuda_graphs=config.hardware.cuda_graphs),
    )
    return model, load_tokenizer(path)


def load_draft_model(
    config: DrafterConfig, device: str, max_model_len: int, *, cuda_graphs: bool = True, report: Report | None = None
) -> tuple[CachedModel, HuggingFaceTokenizer]:
    """The model of a drafter of kind `embedded` or `hf`, and its tokenizer. Raises `ConfigError` as `load_target`."""
    numerics = Numerics.for_device(device, width=DRAFT_ROWS, fixed=False)
    capture = capture_for(device, cuda_graphs=cuda_graphs)
    tokens_per_step = 1 if capture is None else config.tokens_per_replay
    if config.kind == "embedded":
        path = str(embedded_target_path(report=report))
        model = load_embedded_draft(
            path,
            num_layers=config.num_layers,
            vocab_size=config.vocab_size,
            numerics=numerics,
            max_model_len=max_model_len,
            dtype=config.dtype,
            device=device,
            model_impl=config.model_impl,
            capture=capture,
            tokens_per_step=tokens_per_step,
        )
    else:
        path = str(config.model)
        model = load_model(
            path,
            numerics=numerics,
            max_model_len=max_model_len,
            dtype=config.dtype,
            device=device,
            model_impl=config.model_impl,
            capture=capture,
            tokens_per_step=tokens_per_step,
        )
    return model, load_tokenizer(path)
