from __future__ import annotations

import json
from pathlib import Path

import pytest
from models import tiny

from amusd.errors import ConfigError
from amusd.models.detokenizer import IncrementalDecoder
from amusd.models.tokenizer import HuggingFaceTokenizer, Tokenizer, load_tokenizer, user_turn

TEXTS = [
    "plain text",
    "naïve café",
    "中文字符。测试",
    "🎉🎊 party 👩‍👩‍👧‍👦 family",
    "mixed 中 🎉 é a",
    "  two spaces\n\n\ttab ",
]


def test_the_cost_of_a_token_does_not_grow_with_the_text() -> None:
    class Counting:
        longest = 0

        def decode(self, token_ids: list[int]) -> str:
            self.longest = max(self.longest, len(token_ids))
            return "x" * len(token_ids)

    tokenizer = Counting()
    decoder = IncrementalDecoder(tokenizer)  # type: ignore[arg-type]  # decoding is all that is used
    assert "".join(decoder.push(0) for _ in range(500)) == "x" * 500
    assert tokenizer.longest <= 3


def test_the_chat_template_is_applied_with_the_generation_prompt(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}<turn>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<answer>{% endif %}"
    )
    raw = tiny.byte_tokenizer(("<eos>", "<turn>", "<answer>"), template)
    tokenizer = HuggingFaceTokenizer(raw, frozenset())
    ids = tokenizer.encode_chat(user_turn("hi"))
    assert raw.convert_ids_to_tokens(ids) == ["<turn>", "h", "i", "<answer>"]
    assert tokenizer.decode(ids) == "hi"


def test_the_template_gets_its_own_variables_and_not_another_template() -> None:
    template = "{{ tone }}{{ messages[0].name }}{{ tools[0].name }}{% if add_generation_prompt %}!{% endif %}"
    tokenizer = HuggingFaceTokenizer(tiny.byte_tokenizer(chat_template=template), frozenset())
    turns = [{"role": "user", "content": "hi", "name": "Ann"}]
    ids = tokenizer.encode_chat(turns, tone="dry ", tools=[{"name": "f"}], add_generation_prompt=False)
    assert tokenizer.decode(ids) == "dry Annf"
    with pytest.raises(ConfigError, match=r"^prompt: .* refuses it: .*multiple values for keyword argument 'chat_temp"):
        tokenizer.encode_chat(turns, chat_template="x")
    with pytest.raises(ConfigError, match=r"^prompt: the target's chat template refuses it: .*surrogates not allowed"):
        tokenizer.encode_chat(turns, tone="\ud800", tools=[{"name": "f"}])


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles\nmust alternate') }}", "roles must alternate"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ range(1000000000) }}", "Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth exceeded"),
        ("{{ 'a' + 1 }}", "can only concatenate str"),
        ("{% if %}", "Expected an expression"),
    ],
)
def test_a_chat_template_that_fails_is_one_line(template: str, reason: str) -> None:
    tokenizer = HuggingFaceTokenizer(tiny.byte_tokenizer(chat_template=template), frozenset())
    with pytest.raises(ConfigError) as caught:
        tokenizer.encode_chat(user_turn("hi"))
    assert str(caught.value).startswith(f"prompt: the target's chat template refuses it: {reason}")
    assert "\n" not in str(caught.value)


def test_end_tokens_come_from_every_place_that_names_one(tmp_path: Path) -> None:
    tokenizer = tiny.byte_tokenizer()
    tiny.tiny_config(eos_token_id=5, vocab_size=257).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert load_tokenizer(tmp_path).eos_token_ids == {5, 7, 8, tokenizer.eos_token_id}


def test_fingerprints_are_equal_for_one_vocabulary_whatever_the_embedding(tmp_path: Path) -> None:
    fingerprints = []
    for name, vocab_size in (("a", 257), ("b", 320)):
        tiny.tiny_config(vocab_size=vocab_size).save_pretrained(tmp_path / name)
        template = None if name == "a" else "{{ messages }}"
        tiny.byte_tokenizer(chat_template=template).save_pretrained(tmp_path / name)
        fingerprints.append(load_tokenizer(tmp_path / name).fingerprint)
    assert fingerprints[0] == fingerprints[1]
    assert HuggingFaceTokenizer(tiny.byte_tokenizer(("<end>",)), frozenset()).fingerprint not in fingerprints


@pytest.mark.embedded
def test_the_embedded_tokenizer_ends_at_the_end_of_a_turn_and_round_trips(embedded_folder: Path) -> None:
    tokenizer = load_tokenizer(embedded_folder)
    assert isinstance(tokenizer, Tokenizer)
    (end,) = tokenizer.encode("<|im_end|>")
    assert end in tokenizer.eos_token_ids
    for text in TEXTS:
        token_ids = tokenizer.encode(text)
        assert tokenizer.decode(token_ids) == text
    assert len(tokenizer.encode("2024")) == 4  # digits are single tokens in this vocabulary
