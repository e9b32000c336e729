"""Log-probabilities in the two shapes that the API has for them."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

from splash.core.request import TokenLogprob
from splash.engine.tokenizer import Tokenizer

_FLOOR = -9999.0  # JSON has no infinity


def chat_logprobs(tokenizer: Tokenizer, logprobs: Iterable[TokenLogprob]) -> dict[str, Any]:
    """A chat choice's `logprobs`."""
    content = []
    for entry in logprobs:
        top = [_chat_token(tokenizer, token, value) for token, value in entry.top]
        content.append(_chat_token(tokenizer, entry.token, entry.logprob) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """A completion choice's `logprobs`, piece by piece: `text_offset` continues from piece to piece."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def take(self, logprobs: Iterable[TokenLogprob]) -> dict[str, list[Any]]:
        """The next tokens' log-probabilities. The chosen token is among its alternatives, likely or not."""
        piece: dict[str, list[Any]] = {name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
        for entry in logprobs:
            self._add(piece, entry.token, entry, is_shown=not self._tokenizer.is_special(entry.token))
        return piece

    def take_prompt(self, prompt: Sequence[int], text: str, logprobs: Iterable[TokenLogprob]) -> dict[str, list[Any]]:
        """The same for a prompt that is answered with its continuation.

        Args:
            prompt: token ids. The first follows nothing, so its log-probability is None.
            text: what the answer shows of it. Special tokens may be part of it, or have been put around it.
            logprobs: of the tokens after the first.
        """
        piece = self.take(())
        for token, entry in zip(prompt, [None, *logprobs], strict=True):
            special = self._tokenizer.is_special(token)
            is_shown = not special or text.startswith(token_text(self._tokenizer, token), self._offset)
            self._add(piece, token, entry, is_shown)
        self._utf8.reset()
        self._offset = len(text)
        return piece

    def _add(self, piece: dict[str, list[Any]], token: int, entry: TokenLogprob | None, is_shown: bool) -> None:
        text = token_text(self._tokenizer, token)
        piece["tokens"].append(text)
        piece["text_offset"].append(self._offset)
        if entry is None:
            piece["token_logprobs"].append(None)
            piece["top_logprobs"].append(None)
        else:
            value = max(entry.logprob, _FLOOR)
            top = {token_text(self._tokenizer, other): max(score, _FLOOR) for other, score in entry.top}
            piece["token_logprobs"].append(value)
            piece["top_logprobs"].append({**top, text: value})
        if is_shown:
            self._offset += len(self._utf8.decode(self._tokenizer.token_bytes(token)))


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """A token as text; one that is only part of a character as "bytes:" and its bytes, as OpenAI writes them."""
    raw = tokenizer.token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _chat_token(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    return {
        "token": token_text(tokenizer, token),
        "logprob": max(logprob, _FLOOR),
        "bytes": list(tokenizer.token_bytes(token)),
    }
