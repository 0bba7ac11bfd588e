"""What `auto` stands for in a configuration, settled before the workers start."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from amusd.checkpoints.timed_dtype import Keys, settle_dtype
from amusd.config.engine import EngineKeys
from amusd.files import CONFIG_JSON
from amusd.logs import logger

MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Those that `Decoder` computes."""


def settle(config: Keys, device: str) -> Keys:
    """`config` with the dtype and `verify_width` of its target named. Raises `ConfigError` for a missing checkpoint."""
    config = settle_dtype(config, device)
    if config.verify_width != "auto":
        return config
    reason = why_bits_vary(config)
    if reason is not None:
        logger.info("verify_width=bucketed: %s, so that padding would not keep the bits of a token's logits", reason)
    return replace(config, verify_width="fixed" if reason is None else "bucketed")


def why_bits_vary(config: EngineKeys) -> str | None:
    """What makes the bits of the target's rows depend on their pass even if it is padded; None: nothing."""
    model = config.target.model
    if model is None or config.hardware.synthetic is not None:
        return None
    with suppress(OSError, RuntimeError, ValueError, AttributeError):  # what is wrong with it is said below
        if json.loads((Path(model).expanduser() / CONFIG_JSON).read_bytes()).get("model_type") in MODEL_TYPES:
            return None
    from amusd.checkpoints import configuration  # which imports torch

    return configuration.why_bits_vary(configuration.load_config(model))
