"""Tokenizer: text to token ids and back, and chat templates, from an unmodified Hugging Face directory.

Reads `tokenizer.json`, `tokenizer_config.json` and, where present, `chat_template.jinja`. Runs no code that comes with
a checkpoint: templates are rendered in a sandbox.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as Backend

from splash.core.errors import CheckpointError, RequestError

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


class Tokenizer:
    """What the engine and the server need of a tokenizer. Threads may share one.

    Attributes:
        backend: the tokenizer of the `tokenizers` library.
        special_tokens: text of each named special token that the checkpoint defines, for example `bos_token`.
        decoder_steps: type names of the decoder's steps, in order.
        chat_template: Jinja source of the template, None where the model has no chat format.
    """

    def __init__(self, backend: Backend, config: Mapping[str, Any], chat_template: str | None = None) -> None:
        """Use `Tokenizer.load` for a directory.

        Args:
            backend: from `tokenizer.json`.
            config: the contents of `tokenizer_config.json`.
            chat_template: Jinja source, or None where the model has no chat format.

        Raises:
            CheckpointError: the chat template does not compile.
        """
        self.backend = backend
        self.special_tokens = {name: text for name in _SPECIAL_NAMES if (text := _token_text(config.get(name)))}
        extra = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
        extra = list(extra.values()) if isinstance(extra, Mapping) else extra
        named = [*self.special_tokens.values(), *(text for item in extra if (text := _token_text(item)))]
        backend.add_special_tokens([text for text in named if backend.token_to_id(text) is not None])
        self._special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        self.decoder_steps = _decoder_steps(backend)
        self._before, self._after = _added_by_config(self, config)
        self.chat_template = chat_template
        self._template = _compile(chat_template) if chat_template is not None else None

    @classmethod
    def load(cls, directory: str | Path) -> Tokenizer:
        """Read a checkpoint's tokenizer.

        Raises:
            CheckpointError: a file is missing or malformed.
        """
        folder = Path(directory)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{folder} has no tokenizer.json")
        try:
            backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{path} is not a valid tokenizer: {error}") from error
        backend.no_truncation()
        backend.no_padding()
        config = _read_json(folder / "tokenizer_config.json")
        return cls(backend, config, _find_template(folder, config))

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included. A model's own vocabulary may be padded beyond it."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def special_id(self, name: str) -> int | None:
        """Id of a named special token such as "eos_token", or None where the checkpoint has none."""
        text = self.special_tokens.get(name)
        return None if text is None else self.backend.token_to_id(text)

    def special_token(self, text: str) -> int | None:
        """Id of the token that is left out of output text and is written so, None where there is none."""
        token = self.backend.token_to_id(text)
        return token if token is not None and token in self._special_ids else None

    def is_special(self, token: int) -> bool:
        """Whether the token is left out of output text."""
        return token in self._special_ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            text: may contain special tokens, which become their ids.
            add_special_tokens: add the tokens that the model expects around a text, such as a leading bos.

        Raises:
            RequestError: the text contains lone surrogates.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError("prompt", f"is not valid Unicode at character {error.start}") from None
        tokens = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        return [*self._before, *tokens, *self._after] if add_special_tokens else tokens

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids. Ids without a token are left out."""
        return self.backend.decode(tokens, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for, maybe only a part of a character; b"" for an id without a token."""
        text = self.backend.id_to_token(token)
        if text is None:
            return b""
        if "ByteLevel" in self.decoder_steps:
            try:
                return bytes(_BYTE_OF_CHAR[char] for char in text)
            except KeyError:
                return text.encode()
        if (byte := _BYTE_TOKEN.match(text)) and "ByteFallback" in self.decoder_steps:
            return bytes([int(byte[1], 16)])
        return text.replace("▁", " ").encode()

    def is_byte(self, token: int) -> bool:
        """Whether the token is a single byte that decoding fuses with neighbouring bytes."""
        if "ByteFallback" not in self.decoder_steps:
            return False
        text = self.backend.id_to_token(token)
        return text is not None and _BYTE_TOKEN.match(text) is not None

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt text of a conversation. Encode it with `add_special_tokens=False`: templates write their own.

        Args:
            messages: each with "role" and "content".
            add_generation_prompt: end with the opening of an assistant's turn.
            variables: further variables for the template.

        Raises:
            RequestError: there is no template, or it refuses or fails on these messages.
        """
        if self._template is None:
            raise RequestError("messages", "this model has no chat template; use /v1/completions")
        values = {"tools": None, "documents": None} | self.special_tokens | variables
        try:
            return self._template.render(values, messages=messages, add_generation_prompt=add_generation_prompt)
        except Exception as error:  # a template can fail in any way that Python can
            raise RequestError("messages", f"the model's chat template refuses them: {error}") from error


def _token_text(value: object) -> str | None:
    """Special tokens are written as text, or as an object whose "content" is the text."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"{path.parent} has no {path.name}")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold an object, not {type(value).__name__}")
    return value


def _find_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """A file of its own wins over `chat_template` in the config, which is a string or a list of named templates."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, Mapping)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{folder / 'tokenizer_config.json'}: chat_template must be a string")
    return template


def _decoder_steps(backend: Backend) -> tuple[str, ...]:
    if backend.decoder is None:
        return ()
    # Objects of the library do not list their steps; their serialised form does.
    decoder = json.loads(backend.to_str())["decoder"]
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return tuple(step["type"] for step in steps)


def _added_by_config(tokenizer: Tokenizer, config: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """Ids to put before and after a text beyond what `tokenizer.json` adds.

    The Llama tokenizer class, which DeepSeek checkpoints name, obeys `add_bos_token` and `add_eos_token`; for every
    other class `tokenizer.json` alone decides.
    """
    if not str(config.get("tokenizer_class")).startswith("Llama"):
        return [], []
    present = tokenizer.backend.encode("", add_special_tokens=True).ids
    before, after = (
        [token]
        if config.get(flag) and (token := tokenizer.special_id(name)) is not None and token not in present
        else []
        for flag, name in (("add_bos_token", "bos_token"), ("add_eos_token", "eos_token"))
    )
    return before, after


def _byte_level_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE (GPT-2): printable Latin-1 stands for itself, the rest follows from 256."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_level_alphabet()


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks an assistant's text for training; here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012  (declared so by jinja2)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _compile(source: str) -> jinja2.Template:
    """Compile with the settings, filters and functions that Hugging Face templates count on."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise CheckpointError(f"the chat template does not compile: {error}") from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which would change the prompt."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
