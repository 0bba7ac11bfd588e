from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import tiny

from amusd.checkpoints.synthetic import SyntheticTokenizer
from amusd.checkpoints.tokenizer import IncrementalDecoder, Tokenizer, load_tokenizer, user_turn
from amusd.errors import ConfigError, ContextLengthError


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
    template = "{% for m in messages %}<turn>{{ m.content }}{% endfor %}"
    template += "{% if add_generation_prompt %}<answer>{% endif %}"
    raw = tiny.byte_tokenizer(("<eos>", "<turn>", "<answer>"), template)
    tokenizer = Tokenizer(raw.backend_tokenizer, raw.special_tokens_map, template)
    ids = tokenizer.encode_chat(user_turn("hi"))
    assert raw.convert_ids_to_tokens(ids) == ["<turn>", "h", "i", "<answer>"]
    assert tokenizer.decode(ids) == "hi"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles\nmust alternate') }}", "roles must alternate"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% if %}", "Expected an expression"),
    ],
)
def test_a_chat_template_that_fails_is_one_line(template: str, reason: str) -> None:
    tokenizer = Tokenizer(tiny.byte_tokenizer().backend_tokenizer, template=template)
    with pytest.raises(ConfigError) as caught:
        tokenizer.encode_chat(user_turn("hi"))
    assert str(caught.value).startswith(f"prompt: the target's chat template refuses it: {reason}")
    assert "\n" not in str(caught.value)


def test_several_chat_templates_are_refused_for_a_chat_unless_one_is_the_default(tmp_path: Path) -> None:
    tiny.tiny_config(vocab_size=257).save_pretrained(tmp_path)
    tiny.byte_tokenizer().save_pretrained(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    templates = [{"name": "rag", "template": "a"}, {"name": "tool's", "template": "b"}]
    settings = json.loads(file.read_text()) | {"chat_template": templates}
    file.write_text(json.dumps(settings))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("hi")) == "hi"
    with pytest.raises(ConfigError, match=r"there are several \(rag, tool's\), and none is named default"):
        tokenizer.encode_chat(user_turn("hi"))
    file.write_text(json.dumps(settings | {"chat_template": [*templates, {"name": "default", "template": "c"}]}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode_chat(user_turn("hi"))) == "c"


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
    assert Tokenizer(tiny.byte_tokenizer(("<end>",)).backend_tokenizer).fingerprint not in fingerprints


@given(vocab_size=st.integers(2, 2_000), text=st.text(), data=st.data())
def test_the_synthetic_tokenizer_reads_its_own_and_any_text(vocab_size: int, text: str, data: st.DataObject) -> None:
    token_ids = data.draw(st.lists(st.integers(0, vocab_size - 1), max_size=30))
    tokenizer = SyntheticTokenizer(vocab_size)
    decoder = IncrementalDecoder(tokenizer)
    pieces = [decoder.push(token_id) for token_id in token_ids]
    assert "".join(pieces) == tokenizer.decode(token_ids) == "".join(f" {token_id}" for token_id in token_ids)
    assert tokenizer.encode(tokenizer.decode(token_ids)) == token_ids
    read = tokenizer.encode_chat(user_turn(text))
    assert all(0 <= token_id < vocab_size for token_id in read)
    assert bool(read) == bool(text)


def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(tiny.byte_tokenizer().backend_tokenizer, template="{{ messages[0].content }}")
    assert len(tokenizer.encode("a" * 500, 100)) == 500  # counted, as its length does not tell
    assert tokenizer.encode(" " * 9_999 + "a", 100)  # a token may be any number of blanks
    monkeypatch.setattr(tokenizer, "_backend", None)
    for encode in (tokenizer.encode, lambda text, most: tokenizer.encode_chat(user_turn(text), None, most)):
        with pytest.raises(ContextLengthError, match="99999 characters leave no room in max_model_len=100"):
            encode("a" * 99_999, 100)


@pytest.mark.usefixtures("threads_switch_only_when_one_waits")
def test_other_threads_go_on_while_a_text_is_encoded() -> None:
    tokenizer, gate, has_run = Tokenizer(tiny.byte_tokenizer().backend_tokenizer), threading.Lock(), threading.Lock()
    gate.acquire()
    has_run.acquire()

    def other_thread() -> None:
        gate.acquire()
        has_run.release()

    thread = threading.Thread(target=other_thread)
    thread.start()
    gate.release()
    deadline = time.monotonic() + 60.0
    while has_run.locked() and time.monotonic() < deadline:
        tokenizer.encode("ab " * 100_000)
    assert not has_run.locked()
    thread.join()
