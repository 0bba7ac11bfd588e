"""Loads the models and tokenizers of a configuration."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch

from amusd.checkpoints.building import load_model
from amusd.checkpoints.checkpoint import one_line_errors
from amusd.checkpoints.configuration import ModelConfig, check_supported, load_config
from amusd.checkpoints.draft_layouts import read_published
from amusd.checkpoints.draft_networks import BlockModel, load_published
from amusd.checkpoints.embedded_draft import load_embedded_draft
from amusd.checkpoints.embedded_target import DESCRIPTION, embedded_target_path
from amusd.checkpoints.settled import why_bits_vary
from amusd.checkpoints.synthetic import SHAPES, SyntheticTokenizer, load_synthetic, smaller
from amusd.checkpoints.tokenizer import Tokenizer, load_tokenizer
from amusd.checkpoints.vocabulary import SharedVocabulary, share_ids, share_vocabulary
from amusd.config import DrafterConfig, EngineConfig, ModelShape, TargetConfig
from amusd.errors import ConfigError
from amusd.logs import logger
from amusd.models.linear import INT8, fastest_dtype, why_not_int8
from amusd.models.numerics import Numerics
from amusd.models.sharding import ALONE, Ranks
from amusd.runner.graphs import Capture, graph_capture, run_each_time
from amusd.runner.load_options import LoadOptions
from amusd.runner.model_runner import ModelRunner

TOKENS_PER_REPLAY = 4
"""Most draft steps without the host, on GPUs with graphs."""
DRAFT_ROWS = 16
"""Most tokens that a draft's model takes in at once after a rollback."""


def model_path(config: TargetConfig | DrafterConfig) -> str:
    """Folder or hub name of a model; unpacks the embedded target if needed."""
    return str(embedded_target_path()) if config.model is None else config.model


def capture_for(device: str, *, cuda_graphs: bool) -> Capture | None:
    """How passes are captured on `device`; None on a CPU."""
    if not device.startswith("cuda"):
        return None
    return graph_capture(torch.device(device)) if cuda_graphs else run_each_time


def load_target(config: EngineConfig, device: str, ranks: Ranks = ALONE) -> tuple[ModelRunner, Tokenizer]:
    """Load the target's model and tokenizer. Raises `ConfigError` for a missing model or device.

    `ranks`: ranks that share the model.
    """
    start = time.monotonic()
    options = LoadOptions(
        numerics=Numerics.for_device(device, width=config.max_verify_width, fixed=is_fixed(config)),
        max_model_len=config.max_model_len,
        dtype=target_dtype(config, device),
        device=device,
        model_impl=config.target.model_impl,
        capture=capture_for(device, cuda_graphs=config.hardware.cuda_graphs and ranks.captures),
        ranks=ranks,
        state_bytes=state_bytes(config),
    )
    if config.hardware.synthetic is not None:
        model = load_synthetic(config.hardware.synthetic, options)
        tokenizer: Tokenizer = SyntheticTokenizer(model.vocab_size)
    else:
        path = model_path(config.target)
        tokenizer = load_tokenizer(path)
        readers: dict[str, str] = {each.kind: str(each.model) for each in config.drafters if each.can.needs_features}
        features = {kind: read_published(model, path, kind).features for kind, model in readers.items()}
        model = load_model(path, replace(options, features=features))
        if not tokenizer.has_chat_template:
            logger.info(f"model {path}: has no chat template (a base model?), so it is given prompts as they are")
    logger.info(f"target: {describe_target(config, device)}, {time.monotonic() - start:.1f} s")
    return model, tokenizer


def is_fixed(config: EngineConfig) -> bool:
    """Whether the target's passes are padded to one width."""
    return config.verify_width == "fixed" or (config.verify_width == "auto" and why_bits_vary(config) is None)


def state_bytes(config: EngineConfig) -> int:
    """Most bytes of a model's recurrent states that are kept for prompts with the same beginning."""
    return config.prefix_states_mb * 1_000_000 if config.prefix_caching else 0


def describe_target(config: EngineConfig, device: str) -> str:
    """The target's source, dtype and device, for people."""
    shape = config.hardware.synthetic
    source = f"random weights of {shape}" if shape is not None else config.target.model or DESCRIPTION
    return f"{source}, {target_dtype(config, device)} on {device}"


def describe_drafter(config: DrafterConfig, engine: EngineConfig, device: str) -> str:
    """A drafter's kind and source, and the dtype and device of its model, for people."""
    source = config.model or config.factory
    named = config.kind if source is None else f"{config.kind} from {source}"
    if not (config.can.has_model or config.can.needs_features):
        return named
    return f"{named}, {draft_dtype(config, device, engine.hardware.synthetic)} on {device}"


def target_dtype(config: EngineConfig, device: str) -> str:
    """The dtype of the target on `device`."""
    return fastest_dtype(torch.device(device)) if config.target.dtype == "auto" else config.target.dtype


def draft_shape(config: DrafterConfig, target_shape: ModelShape | None) -> ModelShape | None:
    """Shape of a drafter's random weights; None with a checkpoint or without a model."""
    if config.kind != "synthetic" or config.shape is not None:
        return config.shape
    return None if target_shape is None else smaller(target_shape)


def draft_dtype(config: DrafterConfig, device: str, target_shape: ModelShape | None) -> str:
    """The dtype of a drafter's model on `device`."""
    if config.dtype != "auto":
        return config.dtype
    is_embedded = config.kind in ("embedded", "synthetic") and draft_shape(config, target_shape) is None
    is_small = is_embedded or config.can.needs_features
    can = why_not_int8(torch.device(device)) is None
    return INT8 if is_small and can else fastest_dtype(torch.device(device))


def load_draft_model(
    config: DrafterConfig, engine: EngineConfig, device: str
) -> tuple[ModelRunner | BlockModel, Tokenizer | None]:
    """A drafter's model (a cascade's middle model), and the tokenizer of its input ids.

    The target's replaces a different one, if it can be read. None: any ids (`synthetic`). Raises as `load_target`.
    """
    config = config.stages[0]
    options = _draft_options(config, engine, device)
    shape = draft_shape(config, engine.hardware.synthetic)
    if shape is not None:
        return load_synthetic(shape, options), None
    path = model_path(engine.target if config.kind == "self" else config)
    if config.kind == "self":
        check_target(engine)  # some unsupported models state no number of layers
        num_layers = target_settings(engine).get_text_config(decoder=True).num_hidden_layers // 4
        return load_model(path, options, num_layers=config.num_layers or max(1, num_layers)), load_tokenizer(path)
    if config.kind == "hf":
        own = load_tokenizer(path)
        tokenizer, shared = _shared_with_target(own, engine) or (own, None)
        return load_model(path, options, shared), tokenizer
    if config.can.needs_features:
        target_path = model_path(engine.target)
        return load_published(path, target_path, options, config.kind), load_tokenizer(target_path)
    return load_embedded_draft(path, options), None if config.kind == "synthetic" else load_tokenizer(path)


def _draft_options(config: DrafterConfig, engine: EngineConfig, device: str) -> LoadOptions:
    capture = capture_for(device, cuda_graphs=engine.hardware.cuda_graphs)
    return LoadOptions(
        numerics=Numerics.for_device(device, width=DRAFT_ROWS, fixed=False),
        max_model_len=engine.max_model_len,
        dtype=draft_dtype(config, device, engine.hardware.synthetic),
        device=device,
        capture=capture,
        tokens_per_step=1 if capture is None else TOKENS_PER_REPLAY,
        state_bytes=state_bytes(engine),
    )


def _shared_with_target(own: Tokenizer, engine: EngineConfig) -> tuple[Tokenizer, SharedVocabulary] | None:
    """The target's tokenizer, and the vocabulary that a draft with the tokenizer `own` shares.

    None if all ids are equal, or the target's files cannot be read. Raises `ConfigError` for too few shared tokens.
    """
    if engine.hardware.synthetic is not None:
        return None
    try:
        target = load_tokenizer(model_path(engine.target))
    except ConfigError:  # the target's process reports the error
        return None
    if target.fingerprint == own.fingerprint:
        return None if target.num_ids == own.num_ids else (target, share_ids(target.num_ids, own.num_ids))
    return target, share_vocabulary(target.token_texts(), own.token_texts(), target.num_ids, target.encode)


def check_target(config: EngineConfig) -> None:
    """Raise as `load_target` if the target or its ranks cannot run, before reading weights."""
    settings = target_settings(config)
    with one_line_errors(config.target.model or DESCRIPTION):
        check_supported(settings, config.target_tensor_parallel_size)


def target_settings(config: EngineConfig) -> Any:
    """The target's configuration. Raises as `load_target`."""
    if config.hardware.synthetic is not None:
        return ModelConfig(**SHAPES[config.hardware.synthetic])
    return load_config(model_path(config.target), model_impl=config.target.model_impl)
