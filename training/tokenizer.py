"""Byte-level BPE for Scribe: training, saving in Hugging Face layout, loading."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from corpus import Corpus

END_OF_TEXT = "<|endoftext|>"
SYSTEM = "<|system|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
END = "<|end|>"
SPECIAL_TOKENS = [END_OF_TEXT, SYSTEM, USER, ASSISTANT, END]

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] -%}"
    "{{- raise_exception('Roles must be system, user or assistant') -}}"
    "{%- endif -%}"
    "{%- if message['content'] is string -%}"
    "{%- set text = message['content'] -%}"
    "{%- else -%}"
    "{%- set text = message['content'] | map(attribute='text') | join('') -%}"
    "{%- endif -%}"
    "{{- '<|' + message['role'] + '|>' + text | trim + '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def train_tokenizer(corpus: Corpus, phrases: list[str], vocab_size: int = 1024) -> Tokenizer:
    """Train on the training chapters and, repeated, on the phrases of the tasks.

    All 256 bytes are in the alphabet, so any text survives a round trip, and every digit stays a token
    of its own.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    text = ("".join(chapter.pieces) for chapter in corpus.train)
    tokenizer.train_from_iterator([*text, *(phrases * 200)], trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: str | Path, max_length: int) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``."""
    folder = Path(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "bos_token": END_OF_TEXT,
        "eos_token": END,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [SYSTEM, USER, ASSISTANT],
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Load what :func:`save_tokenizer` wrote, without the Hugging Face wrapper."""
    return Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
