"""The stock model of `experiments/peers`: every way to draft gives the same tokens, as many as asked."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from models import tiny

from experiments.peers.stock import StockModel

PROMPT = list(range(5, 25))


def test_generate_goes_on_after_the_end_and_drafts_change_nothing(tmp_path: Path) -> None:
    tokenizer = tiny.byte_tokenizer()
    tiny.save_checkpoint(tmp_path / "model", tiny.tiny_config(vocab_size=len(tokenizer)), tokenizer)
    free = StockModel(str(tmp_path / "model"), dtype="float32", device="cpu").generate(PROMPT, 30)
    assert len(free) == 30
    ending = shutil.copytree(tmp_path / "model", tmp_path / "ending")
    (ending / "generation_config.json").write_text(json.dumps({"eos_token_id": free[2]}))
    model, assistant = (StockModel(str(ending), dtype="float32", device="cpu") for _ in range(2))
    assert model.generate(PROMPT, 30) == free
    assert model.generate(PROMPT, 30, prompt_lookup=4) == free
    for num_tokens in (None, 3):
        assistant.draft(num_tokens)
        assert model.generate(PROMPT, 30, assistant=assistant) == free
