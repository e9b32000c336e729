"""Text from tokens as they come: whole characters, and stop strings that never leak.

However the tokens arrive in chunks, the pieces of text add up to the same.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from splash.engine.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_MAX_CHARACTER_BYTES = 4


class IncrementalDetokenizer:
    """Decodes a growing sequence of tokens in constant amortised time a token.

    The pieces returned add up to what decoding prompt and output together says beyond the prompt's own text, special
    tokens left out unless they are among the visible ones. The prompt is context only: it decides whether a word piece
    at the start gets its space, and an incomplete character at its end may be completed by the output.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), visible: frozenset[int] = frozenset()) -> None:
        exact = tokenizer.decoder_steps == ("ByteLevel",)
        self._decoder = (_ByteDecoder if exact else _WindowDecoder)(tokenizer, prompt, visible)

    def push(self, tokens: Iterable[int]) -> str:
        """Take new tokens; return the text that no later token can change and that was not returned yet."""
        return "".join([self._decoder.step(token) for token in tokens])

    def finish(self) -> str:
        """The rest of the text. Bytes that never became a character are U+FFFD."""
        return self._decoder.finish()


class _ByteDecoder:
    """Byte-level BPE: tokens are bytes, and the text is their UTF-8 decoding with U+FFFD for what is malformed."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], visible: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._visible = visible
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        # A lead byte always begins a character, so the last bytes of the prompt determine the decoder's state.
        tail = b""
        for token in reversed(prompt):
            if len(tail) >= _MAX_CHARACTER_BYTES:
                break
            tail = self._bytes(token) + tail
        self._utf8.decode(tail)
        # An incomplete character of the prompt already counts as U+FFFD there; it is new text only when completed.
        # What begins like a surrogate, which UTF-8 forbids, waits as well and makes two.
        self._known = self._utf8.getstate()[0].decode(errors="replace")

    def step(self, token: int) -> str:
        return self._emit(self._utf8.decode(self._bytes(token)))

    def finish(self) -> str:
        return self._emit(self._utf8.decode(b"", final=True))

    def _bytes(self, token: int) -> bytes:
        hidden = self._tokenizer.is_special(token) and token not in self._visible
        return b"" if hidden else self._tokenizer.token_bytes(token)

    def _emit(self, text: str) -> str:
        if text and self._known:
            known, self._known = self._known, ""
            return text.removeprefix(known)
        return text


class _WindowDecoder:
    """Any other decoder: text is the difference between decoding a window of tokens with and without the newest.

    The window starts with the tokens of the last piece returned, because decoders treat the first token they see
    specially. A run of byte tokens is decoded as a whole, valid or not, so it is held until it ends.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], visible: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._visible = visible
        self._waits_for_characters = "ByteLevel" in tokenizer.decoder_steps
        self._window = self._prompt_tail(prompt)
        self._seen = self._decode()  # text of the window that is prompt or was returned
        self._returned = len(self._window)  # tokens of the window that `_seen` covers

    def step(self, token: int) -> str:
        tokenizer = self._tokenizer
        if self._is_hidden(token):
            return ""
        self._window.append(token)
        if tokenizer.is_byte(token):
            return ""
        text = self._decode()
        if self._waits_for_characters and text.endswith(_REPLACEMENT):
            return ""
        piece = _beyond(self._seen, text)
        if piece:
            del self._window[: self._returned]
            self._seen = self._decode()
        self._returned = len(self._window)
        return piece

    def finish(self) -> str:
        text = self._decode()
        piece = _beyond(self._seen, text)
        self._seen, self._returned = text, len(self._window)
        return piece

    def _is_hidden(self, token: int) -> bool:
        special = self._tokenizer.is_special(token) and token not in self._visible
        return special or self._tokenizer.backend.id_to_token(token) is None

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=False)  # hidden ones are not in it

    def _prompt_tail(self, prompt: Sequence[int]) -> list[int]:
        """The last tokens of the prompt, from a token that is not a byte and so begins nothing unfinished."""
        tail: list[int] = []
        for token in reversed(prompt):
            if self._is_hidden(token):
                continue
            tail.append(token)
            settled = not self._waits_for_characters or len(tail) >= 2 * _MAX_CHARACTER_BYTES
            if settled and not self._tokenizer.is_byte(token):
                break
        return tail[::-1]


def _beyond(seen: str, text: str) -> str:
    """What `text` says after the part that it has in common with `seen`."""
    if text.startswith(seen):
        return text[len(seen) :]
    differ = next((i for i, (a, b) in enumerate(zip(seen, text, strict=False)) if a != b), len(text))
    return text[differ:]


class StopChecker:
    """Finds stop strings in text that comes in pieces.

    The match that is complete first ends the text, the longest where several complete together; so the result does
    not depend on how the text was cut. One automaton a stop string (Knuth, Morris and Pratt) makes the work linear.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(sorted(set(stop), key=len, reverse=True))
        self._failures = tuple(_failure_function(text) for text in self._stop)
        self._matched = [0] * len(self._stop)  # length of the longest prefix of each that the text ends with
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Take text; return what is certainly before any stop string, and the stop string once one is complete."""
        if not self._stop:
            return text, None
        for position, char in enumerate(text):
            for i, stop in enumerate(self._stop):
                matched = self._matched[i]
                while matched and stop[matched] != char:
                    matched = self._failures[i][matched - 1]
                matched += stop[matched] == char
                if matched == len(stop):
                    before = self._held + text[: position + 1]
                    self._held = ""
                    return before[: len(before) - len(stop)], stop
                self._matched[i] = matched
        whole = self._held + text
        safe = len(whole) - max(self._matched)
        self._held = whole[safe:]
        return whole[:safe], None

    def finish(self) -> str:
        """What was held because a stop string might have begun."""
        held, self._held = self._held, ""
        return held


def _failure_function(text: str) -> list[int]:
    """For each prefix of `text`, the length of its longest proper prefix that is also its suffix."""
    failure = [0] * len(text)
    length = 0
    for i in range(1, len(text)):
        while length and text[i] != text[length]:
            length = failure[length - 1]
        length += text[i] == text[length]
        failure[i] = length
    return failure


class OutputText:
    """The text of one request's output: detokenized, and cut before the first stop string.

    Args:
        tokenizer: of the model.
        prompt_tokens: the request's prompt, as context.
        stop: stop strings, none of them empty.
        min_tokens: stop strings count only from the output token after this many.
        visible: special tokens that the text shows all the same.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_tokens: Sequence[int],
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        visible: frozenset[int] = frozenset(),
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_tokens, visible)
        self._checker = StopChecker(stop)
        self._unchecked = min_tokens
        self._stopped = False

    def push(self, tokens: Sequence[int]) -> tuple[str, str | None]:
        """Take new output tokens; return new text, and the stop string that has ended the output.

        After a stop string there is no more text, whatever follows.
        """
        if self._stopped:
            return "", None
        free = min(self._unchecked, len(tokens))
        self._unchecked -= free
        before = self._detokenizer.push(tokens[:free])
        text, stop = self._checker.push(self._detokenizer.push(tokens[free:]))
        self._stopped = stop is not None
        return before + text, stop

    def finish(self) -> str:
        """The rest of the text, for an output that ended otherwise than by a stop string."""
        if self._stopped:
            return ""
        self._stopped = True
        text, stop = self._checker.push(self._detokenizer.finish())
        return text if stop is not None else text + self._checker.finish()
