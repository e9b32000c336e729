"""Requests: what to generate from which tokens, and how to sample."""

from __future__ import annotations

import math

import msgspec

from splash.core.errors import RequestError

MAX_LOGPROBS = 20
MAX_LISTED = 1024  # tokens that a request may name: each is looked at every step
MAX_STOPS = 64  # stop strings, each of which is compared with every character of the output
MAX_STOP_CHARS = 1024
MAX_INT = 2**31 - 1  # what no count comes near, and what a message to the ranks can carry


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """How the tokens of one request are chosen. Names and meanings are those of vLLM and the OpenAI API.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 and `min_p` 0 switch those filters off. `seed` None draws one.
    `logprobs` None returns none, 0 the chosen token's, k the k most likely as well; `prompt_logprobs` is the same for
    the prompt's tokens after the first. `logit_bias` has each token at most once, with what to add to its logit.
    `grammar` is what the output must match, as `splash.engine.grammar` makes it.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: str | None = None
    prompt_logprobs: int | None = None

    @property
    def has_penalties(self) -> bool:
        """Whether scores depend on the tokens so far."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @property
    def changes_logits(self) -> bool:
        """Whether another token may be the most likely one than the model says, `min_tokens` aside."""
        return self.has_penalties or bool(self.logit_bias) or self.grammar is not None

    @property
    def is_greedy(self) -> bool:
        """Whether every token is the most likely one, and nothing but the token is asked for."""
        asks_for_more = self.logprobs is not None or self.prompt_logprobs is not None
        return self.temperature == 0 and self.min_tokens == 0 and not self.changes_logits and not asks_for_more

    def validate(self) -> None:
        """Check every field.

        Raises:
            RequestError: naming the first field that is out of range and what it accepts.
        """
        for field, ok, accepted in (
            ("max_tokens", 1 <= self.max_tokens <= MAX_INT, f"between 1 and {MAX_INT}"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "between 0 and max_tokens"),
            ("temperature", math.isfinite(self.temperature) and 0.0 <= self.temperature <= 100.0, "between 0 and 100"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            ("top_k", 0 <= self.top_k <= MAX_INT, f"between 0 and {MAX_INT} (0 switches it off)"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "between 0 and 1"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "between -2 and 2"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "between -2 and 2"),
            ("repetition_penalty", 0.0 < self.repetition_penalty <= 100.0, "above 0 and at most 100"),
            ("seed", self.seed is None or -(2**63) <= self.seed < 2**63, "a 64-bit integer"),
            ("stop", all(self.stop), "non-empty strings"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS, f"between 0 and {MAX_LOGPROBS}"),
            (
                "prompt_logprobs",
                self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= MAX_LOGPROBS,
                f"between 0 and {MAX_LOGPROBS}",
            ),
            ("logit_bias", all(-100.0 <= bias <= 100.0 for _, bias in self.logit_bias), "between -100 and 100 a token"),
        ):
            if not ok:
                raise RequestError(field, f"must be {accepted}, not {getattr(self, field)!r}")
        for field, most in (("logit_bias", MAX_LISTED), ("stop_token_ids", MAX_LISTED), ("stop", MAX_STOPS)):
            if len(getattr(self, field)) > most:
                raise RequestError(field, f"may have at most {most} entries, not {len(getattr(self, field))}")
        if any(len(text) > MAX_STOP_CHARS for text in self.stop):
            raise RequestError("stop", f"may have at most {MAX_STOP_CHARS} characters each")
        if self.grammar is not None:
            for field in ("min_tokens", "ignore_eos"):
                if getattr(self, field):
                    raise RequestError(field, "cannot be used where a grammar decides when the output ends")


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of a chosen token (natural log) and the most likely alternatives, most likely first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
