"""Tokenizers load from unmodified directories and agree with transformers, templates included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from splash.core.errors import CheckpointError, RequestError
from splash.engine.tokenizer import Tokenizer

TEMPLATE = """{{ bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'forbidden' %}
        {{ raise_exception('no such role') }}
    {%- endif %}
    {%- if loop.index > 5 %}{% break %}{% endif %}
    {% generation %}
<|{{ message['role'] }}|>{{ message['content'] | trim }}{{ eos_token }}
    {% endgeneration %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}
{%- if extra is defined %}{{ extra | tojson }}{% endif %}"""
MESSAGES = [{"role": "system", "content": "Be <brief> & kind."}, {"role": "user", "content": " Hé! "}]


def write(folder: Path, config: dict[str, Any] | None = None, adds_bos: bool = False) -> Path:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in ("<s>", "</s>", "<|user|>")],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(["hello world, hello there"], trainer)
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    backend.save(str(folder / "tokenizer.json"))
    eos = {"__type": "AddedToken", "content": "</s>", "special": True}
    base = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": eos}
    config = {**base, "chat_template": TEMPLATE} if config is None else {**base, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("config", "adds_bos"),
    [
        ({}, False),
        ({}, True),
        ({"add_bos_token": True, "add_eos_token": True}, False),
        ({"add_bos_token": False}, True),
    ],
)
def test_encoding_and_decoding_equal_transformers(tmp_path: Path, config: dict[str, Any], adds_bos: bool) -> None:
    folder = write(tmp_path, config, adds_bos)
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    for text in ("hello world", "", "Hé 👩‍👩‍👧‍👦 <|user|>there</s>"):
        for special in (True, False):
            tokens = ours.encode(text, add_special_tokens=special)
            assert tokens == theirs.encode(text, add_special_tokens=special)
            assert ours.decode(tokens) == theirs.decode(tokens, skip_special_tokens=True)
            assert ours.decode(tokens, skip_special_tokens=False) == theirs.decode(tokens)
    assert ours.special_id("eos_token") == theirs.eos_token_id
    assert ours.special_id("unk_token") is None
    assert ours.is_special(theirs.eos_token_id)


@pytest.mark.parametrize("adds_bos", [True, False])
def test_the_llama_class_obeys_the_flags_of_its_config(tmp_path: Path, adds_bos: bool) -> None:
    config = {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True, "add_eos_token": False}
    tokenizer = Tokenizer.load(write(tmp_path, config, adds_bos))
    assert tokenizer.encode("hello") == [tokenizer.special_id("bos_token"), *tokenizer.encode("hello", False)]


@pytest.mark.parametrize("generation_prompt", [True, False])
def test_chat_templates_equal_transformers(tmp_path: Path, generation_prompt: bool) -> None:
    folder = write(tmp_path)
    theirs = AutoTokenizer.from_pretrained(folder)
    for variables in ({}, {"extra": {"é": "<&>"}}):
        text = Tokenizer.load(folder).apply_chat_template(MESSAGES, generation_prompt, **variables)
        assert text == theirs.apply_chat_template(
            MESSAGES, tokenize=False, add_generation_prompt=generation_prompt, **variables
        )
    assert "Be <brief> & kind.</s>" in text


def test_a_template_file_wins_and_named_templates_have_a_default(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "named"}]
    folder = write(tmp_path, {"chat_template": named})
    assert Tokenizer.load(folder).apply_chat_template(MESSAGES) == "named"
    (folder / "chat_template.jinja").write_text("{{ strftime_now('%Y') | length }}", encoding="utf-8")
    assert Tokenizer.load(folder).apply_chat_template(MESSAGES) == "4"


def test_refusals_of_a_template_are_the_requests_fault(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write(tmp_path))
    with pytest.raises(RequestError, match="no such role") as refused:
        tokenizer.apply_chat_template([{"role": "forbidden", "content": ""}])
    assert refused.value.field == "messages"
    with pytest.raises(RequestError, match="refuses them"):  # any failure of the template's own
        Tokenizer.load(write(tmp_path, {"chat_template": "{{ messages + 1 }}"})).apply_chat_template(MESSAGES)
    with pytest.raises(RequestError, match="has no chat template"):
        Tokenizer.load(write(tmp_path, {})).apply_chat_template(MESSAGES)


@pytest.mark.parametrize("attack", ["{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.append(1) }}"])
def test_templates_cannot_reach_python(tmp_path: Path, attack: str) -> None:
    tokenizer = Tokenizer.load(write(tmp_path, {"chat_template": attack}))
    with pytest.raises(RequestError, match=r"unsafe|not safely callable"):
        tokenizer.apply_chat_template(MESSAGES)


def test_broken_directories_say_which_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    write(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no tokenizer_config\.json"):
        Tokenizer.load(tmp_path)
    for content, message in (
        ("{", "not valid JSON"),
        ("[]", "must hold an object"),
        ('{"chat_template": 3}', "string"),
    ):
        (tmp_path / "tokenizer_config.json").write_text(content, encoding="utf-8")
        with pytest.raises(CheckpointError, match=message):
            Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{% if %}"}', encoding="utf-8")
    with pytest.raises(CheckpointError, match="does not compile"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(CheckpointError, match="not a valid tokenizer"):
        Tokenizer.load(tmp_path)


def test_lone_surrogates_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="not valid Unicode at character 1") as refused:
        Tokenizer.load(write(tmp_path)).encode("a\ud800b")
    assert refused.value.field == "prompt"


def test_token_bytes_add_up_to_the_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write(tmp_path))
    text = "hello 👩‍👩‍👧‍👦 é</s>"
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()
    assert tokenizer.token_bytes(tokenizer.vocab_size + 5) == b""
