"""Log-probabilities in the two shapes that the API has for them."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
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
        tokens, values, tops, offsets = [], [], [], []
        for entry in logprobs:
            text = token_text(self._tokenizer, entry.token)
            value = max(entry.logprob, _FLOOR)
            tokens.append(text)
            values.append(value)
            top = {token_text(self._tokenizer, token): max(other, _FLOOR) for token, other in entry.top}
            tops.append({**top, text: value})
            offsets.append(self._offset)
            if not self._tokenizer.is_special(entry.token):
                self._offset += len(self._utf8.decode(self._tokenizer.token_bytes(entry.token)))
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


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
