from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from amusd.errors import ConfigError
from amusd.models.draft_file import DraftWeights, read_draft, write_draft


def some_draft() -> DraftWeights:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "model.layers.0.mlp.up_proj.weight": torch.randn(7, 5, generator=generator) * torch.logspace(-3, 3, 7)[:, None],
        "model.layers.1.mlp.up_proj.weight": torch.zeros(2, 5),
        "model.norm.weight": torch.randn(5, generator=generator),
    }
    return DraftWeights(tensors, torch.tensor([9, 2, 4]), {"seed": 3})


def test_rows_come_back_within_half_a_step_whatever_their_size(tmp_path: Path) -> None:
    draft = some_draft()
    write_draft(tmp_path / "draft.safetensors", draft)
    read = read_draft(tmp_path / "draft.safetensors")
    assert read.num_layers == 2
    assert read.facts == {"seed": 3}
    assert read.output_ids.tolist() == [9, 2, 4]
    assert set(read.tensors) == set(draft.tensors)
    for name, tensor in draft.tensors.items():
        half_step = tensor.abs().amax(dim=-1, keepdim=True) / 127 / 2 if tensor.ndim == 2 else 0.0
        assert ((read.tensors[name] - tensor).abs() <= half_step * 1.001).all(), name
        assert read.tensors[name].dtype is torch.float32


def test_only_the_file_itself_is_left(tmp_path: Path) -> None:
    write_draft(tmp_path / "draft.safetensors", some_draft())
    assert [path.name for path in tmp_path.iterdir()] == ["draft.safetensors"]


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.safetensors") as caught:
        read_draft(tmp_path / "none.safetensors")
    assert "\n" not in str(caught.value)


def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "draft.safetensors"
    write_draft(path, some_draft())
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ConfigError, match="draft") as caught:
        read_draft(path)
    assert "\n" not in str(caught.value)


def test_another_format_is_refused(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(1)}, tmp_path / "draft.safetensors")
    with pytest.raises(ConfigError, match="not a file of the format amusd-draft-1"):
        read_draft(tmp_path / "draft.safetensors")
