"""Grammars: what an output may look like, as text that llguidance compiles.

A grammar is made and checked beside the caller, crosses to the ranks as text, and is followed on the rank that samples:
that rank knows each token first, so the mask of the next one is ready before its logits are. The library is loaded with
the first grammar.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_GRAMMAR_CHARS = 1 << 17
MAX_COMPILED = 64  # grammars kept for requests that bring the same again, as the choices of one do
# Where only one text can follow, the model still says in which tokens: encoding a text by itself may add a space to it.
_OPTIONS = '%llguidance {"no_forcing": true}\n'
# Between tokens of JSON: a space, or a line's end and indentation. With more a weak model fills its output.
WHITESPACE = r" |\n[ \t]{0,24}"


class TokenTable(Protocol):
    """What following a grammar takes from a tokenizer."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def token_bytes(self, token: int) -> bytes: ...

    def is_special(self, token: int) -> bool: ...


class GrammarFailed(Exception):
    """A grammar cannot be compiled, turned out too costly to follow, or allows nothing more."""


def json_schema_grammar(schema: Any) -> str:
    """The JSON texts that a JSON schema describes.

    Args:
        schema: decoded.

    Raises:
        ValueError: it is no schema, has keywords that cannot be enforced, or allows nothing.
    """
    return _checked(f"start: {json_rule(schema)}")


def json_rule(schema: Any) -> str:
    """A part of a grammar, in Lark's notation, that stands for the JSON texts of a schema. Not checked.

    Raises:
        ValueError: it is not a schema at all.
    """
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    if not isinstance(schema, dict):
        raise ValueError("a schema must be a JSON object")
    try:
        return "%json " + json.dumps({**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}}, allow_nan=False)
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None


def regex_grammar(pattern: str) -> str:
    """The texts that a regular expression matches as a whole.

    Raises:
        ValueError: it cannot be compiled, or is too costly.
    """
    from llguidance import LLMatcher

    escaped = json.loads(LLMatcher.grammar_from_regex(pattern))["grammars"][0]["lark_grammar"]
    return _checked(escaped)


def choice_grammar(choices: Sequence[str]) -> str:
    """One of some texts.

    Raises:
        ValueError: there are none, or too many.
    """
    return _checked("start: " + " | ".join(json.dumps(choice) for choice in choices))


def _checked(rules: str) -> str:
    grammar = _OPTIONS + rules
    check_grammar(grammar)
    return grammar


class Notation:
    """Writes grammars in Lark's notation, in which markers may be special tokens.

    Args:
        special_token: the id of the special token that a marker is, None for one that is made of text.
    """

    def __init__(self, special_token: Callable[[str], int | None]) -> None:
        self._special_token = special_token
        self._rules: dict[str, str] = {}

    def marker(self, text: str) -> str:
        """The marker itself."""
        token = self._special_token(text)
        return json.dumps(text) if token is None else f"<[{token}]>"

    def until(self, text: str) -> str:
        """Anything up to the marker for the first time, and the marker."""
        token = self._special_token(text)
        if token is not None:
            return f"/(?s:.*)/ <[{token}]>"
        return self._rules.setdefault(f"/(?s:.*)/ {json.dumps(text)}", f"until_{len(self._rules)}")

    def grammar(self, start: str) -> str:
        """The grammar whose whole is `start`."""
        return _OPTIONS + "\n".join(
            [f"start: {start}", *(f"{name}[lazy]: {body}" for body, name in self._rules.items())]
        )


@functools.lru_cache(64)
def check_grammar(grammar: str) -> None:
    """Compile a grammar that names no token, see what it begins with, and forget it.

    Raises:
        ValueError: it cannot be compiled, is too large or too costly, or allows no text at all.
    """
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise ValueError(f"has {len(grammar)} characters as a grammar, and at most {MAX_GRAMMAR_CHARS} are accepted")
    try:
        _next_mask(_compile(_byte_table(), grammar))
    except GrammarFailed as error:
        raise ValueError(" ".join(str(error).split())[:500]) from None


class Grammars:
    """Compiles grammars for the sampler, in a thread of its own, while the model runs.

    Nothing is loaded before the first grammar arrives.

    Args:
        load: reads the model's tokenizer.
        vocab_size: V of the logits. Ids without a token are never allowed.
        eos_token_ids: tokens that may follow once the grammar is satisfied.
    """

    def __init__(self, load: Callable[[], TokenTable], vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._load = load
        self._vocab_size = vocab_size
        self._eos_token_ids = [token for token in eos_token_ids if token < vocab_size]
        self._thread: ThreadPoolExecutor | None = None
        self._table: LLTokenizer | None = None
        self._compiled: dict[str, LLMatcher] = {}  # at their beginning; the last used come last

    def begin(self, grammar: str, output: Sequence[int] = ()) -> Constraint:
        """Start following a grammar behind `output`, which it has allowed. Should it not, the first mask says so."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "splash-grammar")
        return Constraint(self._thread.submit(self._begin, grammar, output), self._vocab_size)

    def forget(self, grammar: str) -> None:
        """Compile it anew the next time: copies share what has been worked out, and what has failed."""
        assert self._thread is not None, "it has begun"
        self._thread.submit(self._compiled.pop, grammar, None)

    def _begin(self, grammar: str, output: Sequence[int]) -> LLMatcher:
        if self._table is None:
            self._table = _table(self._load(), self._vocab_size, self._eos_token_ids)
        matcher = self._compiled.pop(grammar, None) or _compile(self._table, grammar)
        self._compiled[grammar] = matcher
        if len(self._compiled) > MAX_COMPILED:
            del self._compiled[next(iter(self._compiled))]
        begun = matcher.deep_copy()
        if output:
            begun.consume_tokens(list(output))
        return begun


class Constraint:
    """One request's place in its grammar."""

    def __init__(self, matcher: Future[LLMatcher], vocab_size: int) -> None:
        self._matcher = matcher
        self._num_bytes = -(-vocab_size // 32) * 4
        self._mask: np.ndarray | None = None

    def mask(self) -> np.ndarray:
        """Which tokens may come next: int32 [ceil(V / 32)], token i in bit i % 32 of word i // 32.

        Raises:
            GrammarFailed: there is no saying, or no token may come.
        """
        if self._mask is None:
            packed = _next_mask(self._matcher.result())  # of the tokens, and of some more, which cannot come
            self._mask = np.frombuffer(packed.ljust(self._num_bytes, b"\0"), np.int32, self._num_bytes // 4)
        return self._mask

    def accept(self, token: int) -> None:
        """Move on by a token that `mask` allowed. Should that fail, the next `mask` says so."""
        self._mask = None
        self._matcher.result().consume_token(token)

    def prepare(self) -> None:
        """Work out the mask now, unless the grammar is still being compiled. A failure is left to `mask`."""
        if self._matcher.done():
            with contextlib.suppress(GrammarFailed):
                self.mask()


def _compile(table: LLTokenizer, grammar: str) -> LLMatcher:
    """Compile within limits that keep a grammar under 100 ms and 100 MB."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(
        initial_lexer_fuel=200_000,
        step_lexer_fuel=100_000,
        step_max_items=50_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )
    matcher = LLMatcher(table, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        raise GrammarFailed(matcher.get_error())
    return matcher


def _next_mask(matcher: LLMatcher) -> bytearray:
    """A bit for each token of the table that may come next."""
    mask = bytearray(matcher.compute_bitmask())
    if matcher.is_error():
        raise GrammarFailed(matcher.get_error())
    if not any(mask):
        raise GrammarFailed("no token can come next")
    return mask


class _Vocabulary:
    """A tokenizer's tokens as llguidance reads them."""

    def __init__(self, tokens: TokenTable, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokens = tokens
        self.eos_token_id = eos_token_ids[0] if eos_token_ids else 0
        self.bos_token_id = None
        self.special_token_ids = [token for token in range(vocab_size) if tokens.is_special(token)]
        self.tokens = [tokens.token_bytes(token) for token in range(vocab_size)]

    def __call__(self, text: str | bytes) -> list[int]:
        text = text.decode(errors="replace") if isinstance(text, bytes) else text
        return self._tokens.encode(text, add_special_tokens=False)


def _table(tokens: TokenTable, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Takes a second and 50 MB for a vocabulary of 128,000, and holds the interpreter's lock meanwhile."""
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_Vocabulary(tokens, vocab_size, eos_token_ids)), eos_token=list(eos_token_ids))


class _Bytes:
    """A token for each byte, and one for the end."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b"<end>"

    def is_special(self, token: int) -> bool:
        return token == 256


@functools.cache
def _byte_table() -> LLTokenizer:
    return _table(_Bytes(), 257, [256])
