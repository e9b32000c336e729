"""Choosing tokens from logits, on rank 0.

A request's token depends on its logits, its parameters, its seed and its position, and on nothing else: neither the
other requests of the batch nor the layout or the number of ranks. So the randomness is one hashed uniform a token,
applied to the cumulative distribution in vocabulary order.

Shape suffixes: n rows, m some of them, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from splash.core.request import SamplingParams, TokenLogprob
from splash.core.step import NewRequest
from splash.engine.grammar import Constraint, GrammarFailed, Grammars
from splash.platform.host_copies import Download, upload
from splash.platform.kernels import Kernels

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from a request's seed and a position: splitmix64 (Steele, Lea and Flood, OOPSLA '14)."""
    bits = _mix(_mix(seed & _MASK) + (position + 1) * _GAMMA & _MASK)
    return (bits >> 11) * 2.0**-53


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


@dataclass(slots=True)
class _State:
    """What is kept of a request. `row` is its place in the penalty tables, None without penalties."""

    new: NewRequest
    is_plain: bool  # greedy, and nothing touches the logits once min_tokens are out
    banned: tuple[int, ...]  # tokens that must not come before min_tokens are out
    row: int | None = None
    num_outputs: int = 0

    @property
    def params(self) -> SamplingParams:
        return self.new.params


class Sampled:
    """Tokens that have been chosen, on the device and on their way to the host.

    Args:
        tokens_n: int64 [n].
        wanted: (row, how many of the likeliest tokens) of each row that wants log-probabilities.
        logprobs: of these rows, where there are any.

    Attributes:
        tokens_n: as given.
    """

    def __init__(
        self, tokens_n: torch.Tensor, wanted: Sequence[tuple[int, int]] = (), logprobs: Sequence[torch.Tensor] = ()
    ) -> None:
        self.tokens_n = tokens_n
        self._wanted = wanted
        self._download = Download(tokens_n, *logprobs)

    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._download.is_done()

    def wait(self) -> tuple[list[int], list[TokenLogprob | None]]:
        """The tokens, and of rows that want it the log-probability under the softmax of the logits as they came."""
        tokens_n, *parts = self._download.wait()
        tokens = tokens_n.tolist()
        logprobs: list[TokenLogprob | None] = [None] * len(tokens)
        if parts:
            rows, nums = zip(*self._wanted, strict=True)
            for row, entry in zip(rows, _entries([tokens[row] for row in rows], nums, parts), strict=True):
                logprobs[row] = entry
        return tokens, logprobs


class Sampler:
    """Samples for the live requests and remembers what each has generated.

    Filters are applied in this order: penalties, logit_bias, the grammar, temperature, min_p, top_k, top_p. Tokens as
    likely as the last one that top_k or top_p keeps are kept too. A request that is computed again after preemption is
    not added again: what it has generated stays. On ranks that were started anew it comes with what it has generated.

    Args:
        eos_token_ids: tokens that may not come before `min_tokens`, except where a request ignores them.
        kernels: finds where nuclei end.
        grammars: compiles the grammars of requests that have one.

    Attributes:
        failures: of the last call of `sample`, the requests whose grammar could not be followed, with the reason.
    """

    def __init__(self, eos_token_ids: Collection[int], kernels: Kernels, grammars: Grammars | None = None) -> None:
        self._eos_token_ids = tuple(eos_token_ids)
        self._kernels = kernels
        self._grammars = grammars
        self.failures: list[tuple[int, str]] = []
        self._states: dict[int, _State] = {}
        self._constraints: dict[int, Constraint] = {}
        self._penalties = _PenaltyTables()

    def add(self, new: NewRequest) -> None:
        """Begin a request."""
        assert new.id not in self._states, f"request {new.id} was added before"
        params = new.params
        if params.grammar is not None:
            assert self._grammars is not None, "a grammar needs a vocabulary"
            self._constraints[new.id] = self._grammars.begin(params.grammar, new.output)
        is_plain = params.temperature == 0 and params.logprobs is None and not params.changes_logits
        eos = () if params.ignore_eos else self._eos_token_ids
        banned = (*eos, *params.stop_token_ids) if params.min_tokens else ()
        self._states[new.id] = _State(new, is_plain, banned, num_outputs=len(new.output))

    def remove(self, id: int) -> None:
        """Forget a request."""
        state = self._states.pop(id)
        self._constraints.pop(id, None)
        if state.row is not None:
            self._penalties.remove(state.row)

    def sample(self, logits_nV: torch.Tensor, queries: Sequence[tuple[int, int]]) -> Sampled:
        """Choose one token a row, and record it as the request's next output.

        Waits for the device only where a request has a grammar.

        Args:
            logits_nV: [n, V] float32 on any device, left as they are. May be overwritten by what is queued after this.
            queries: (request, position of the row) of each row. A request has at most one row.
        """
        assert logits_nV.shape[0] == len(queries)
        states = [self._states[id] for id, _ in queries]
        self.failures = []
        if all(state.is_plain and state.num_outputs >= state.params.min_tokens for state in states):
            sampled = Sampled(logits_nV.argmax(dim=-1))
        else:
            sampled = self._sample(logits_nV, queries, states)
        for state in states:
            state.num_outputs += 1
        return sampled

    def take(self, tokens_n: torch.Tensor, requests: Sequence[int]) -> Sampled:
        """Record tokens as the next outputs of greedy `requests`, for which nobody needed all logits."""
        self.failures = []
        for id in requests:
            self._states[id].num_outputs += 1
        return Sampled(tokens_n)

    def _sample(self, logits_nV: torch.Tensor, queries: Sequence[tuple[int, int]], states: Sequence[_State]) -> Sampled:
        tokens_n = self._choose(self._adjust(logits_nV, queries), states, [position for _, position in queries])
        penalised = [(row, state.row) for row, state in enumerate(states) if state.row is not None]
        if penalised:
            rows, table_rows = zip(*penalised, strict=True)
            self._penalties.record(table_rows, tokens_n[_on_device(rows, tokens_n.device)])
        wanted = [(row, state.params.logprobs) for row, state in enumerate(states) if state.params.logprobs is not None]
        logprobs: Sequence[torch.Tensor] = ()
        if wanted:
            rows_m = _on_device([row for row, _ in wanted], tokens_n.device)
            logprobs = _logprobs(logits_nV[rows_m], tokens_n[rows_m], max(num for _, num in wanted))
        sampled = Sampled(tokens_n, wanted, logprobs)
        constraints = [(row, self._constraints[id]) for row, (id, _) in enumerate(queries) if id in self._constraints]
        if constraints:
            tokens, _ = sampled.wait()
            for row, constraint in constraints:
                constraint.accept(tokens[row])
        return sampled

    def score(self, logits_nV: torch.Tensor, id: int, position: int) -> tuple[TokenLogprob, ...]:
        """Log-probabilities of a request's prompt from `position` on, whose logits are the first row.

        Rows beyond the prompt's end have none.
        """
        state = self._states[id]
        tokens = state.new.prompt[position : position + len(logits_nV)]
        if not tokens:
            return ()
        assert state.params.prompt_logprobs is not None
        num = state.params.prompt_logprobs
        parts = _logprobs(logits_nV[: len(tokens)], _on_device(tokens, logits_nV.device), num)
        return tuple(_entries(tokens, [num] * len(tokens), Download(*parts).wait()))

    def prepare(self) -> None:
        """Work out, in the time until the next step, which tokens grammars allow then. Need not be called."""
        for constraint in self._constraints.values():
            constraint.prepare()

    def _adjust(self, logits_nV: torch.Tensor, queries: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Penalties, biases, and -inf for what is forbidden. Returns `logits_nV` itself where there is none of them."""
        states = [self._states[id] for id, _ in queries]
        penalised = [row for row, state in enumerate(states) if state.params.has_penalties]
        biased = [
            (row, token, bias)
            for row, state in enumerate(states)
            for token, bias in state.params.logit_bias
            if 0 <= token < logits_nV.shape[1]
        ]
        banned = [
            (row, token)
            for row, state in enumerate(states)
            if state.banned and state.num_outputs < state.params.min_tokens
            for token in state.banned
            if 0 <= token < logits_nV.shape[1]
        ]
        masks = self._masks([id for id, _ in queries]) if self._constraints else {}
        if not (penalised or biased or banned or masks):
            return logits_nV
        device = logits_nV.device
        logits_nV = logits_nV.clone()
        if penalised:
            users = [states[row] for row in penalised]
            for state in users:
                if state.row is None:
                    state.row = self._penalties.add(state.new, logits_nV.shape[1], device)
            rows_m = _on_device(penalised, device)
            logits_nV[rows_m] = self._penalties.apply(logits_nV[rows_m], users)
        if biased:
            rows, tokens, biases = zip(*biased, strict=True)
            logits_nV[_on_device(rows, device), _on_device(tokens, device)] += _on_device(
                biases, device, logits_nV.dtype
            )
        if banned:
            rows_b, tokens_b = _on_device(banned, device).unbind(1)
            logits_nV[rows_b, tokens_b] = -torch.inf
        if masks:
            rows_m = _on_device(list(masks), device)
            packed_mW = torch.from_numpy(np.stack(list(masks.values())))
            allowed_mV = allowed_tokens(upload(packed_mW, device), logits_nV.shape[1])
            logits_nV[rows_m] = logits_nV[rows_m].masked_fill(~allowed_mV, -torch.inf)
        return logits_nV

    def _masks(self, ids: Sequence[int]) -> dict[int, np.ndarray]:
        """The packed masks of those rows whose request has a grammar; failures are set down and have none."""
        masks = {}
        for row, id in enumerate(ids):
            if id in self._constraints:
                try:
                    masks[row] = self._constraints[id].mask()
                except GrammarFailed as error:
                    self.failures.append((id, str(error)))
                    del self._constraints[id]
                    if self._grammars is not None and (grammar := self._states[id].params.grammar) is not None:
                        self._grammars.forget(grammar)
        return masks

    def _choose(self, logits_nV: torch.Tensor, states: Sequence[_State], positions: Sequence[int]) -> torch.Tensor:
        tokens_n = logits_nV.argmax(dim=-1)
        drawn = [row for row, state in enumerate(states) if state.params.temperature > 0]
        if drawn:
            rows_m = _on_device(drawn, logits_nV.device)
            scores_mV = _filter(logits_nV[rows_m], [states[row].params for row in drawn], self._kernels)
            uniforms = [uniform(states[row].new.seed, positions[row]) for row in drawn]
            tokens_n[rows_m] = _inverse_cdf(scores_mV, uniforms)
        return tokens_n


def allowed_tokens(packed_mW: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Unpack masks of grammars: int32 [m, ceil(V / 32)] to bool [m, V]."""
    bits = torch.arange(32, dtype=torch.int32, device=packed_mW.device)
    return ((packed_mW.unsqueeze(-1) >> bits) & 1).bool().flatten(1)[:, :vocab_size]


class _PenaltyTables:
    """A row for each request with penalties: which tokens its prompt has (bool), how often its output has each."""

    def __init__(self) -> None:
        self._prompt_rV: torch.Tensor | None = None
        self._counts_rV: torch.Tensor | None = None
        self._free: list[int] = []

    def add(self, new: NewRequest, vocab_size: int, device: torch.device) -> int:
        """A row for a request that has sampled nothing here yet."""
        if self._prompt_rV is None or self._counts_rV is None:
            self._prompt_rV = torch.empty(0, vocab_size, dtype=torch.bool, device=device)
            self._counts_rV = torch.empty(0, vocab_size, dtype=torch.float32, device=device)
        if not self._free:
            num_rows = self._prompt_rV.shape[0]
            grown = max(4, num_rows)
            self._prompt_rV = torch.cat((self._prompt_rV, self._prompt_rV.new_zeros(grown, vocab_size)))
            self._counts_rV = torch.cat((self._counts_rV, self._counts_rV.new_zeros(grown, vocab_size)))
            self._free.extend(reversed(range(num_rows, num_rows + grown)))
        row = self._free.pop()
        self._prompt_rV[row] = False
        self._prompt_rV[row, _on_device(new.prompt, device)] = True
        output = torch.tensor(new.output, dtype=torch.int64)
        self._counts_rV[row] = upload(output.bincount(minlength=vocab_size), device)
        return row

    def remove(self, row: int) -> None:
        """Give a row back."""
        self._free.append(row)

    def record(self, rows: Sequence[int], tokens_m: torch.Tensor) -> None:
        """Count an output token of each of `rows`, each at most once."""
        assert self._counts_rV is not None
        self._counts_rV[_on_device(rows, tokens_m.device), tokens_m] += 1

    def apply(self, logits_mV: torch.Tensor, states: Sequence[_State]) -> torch.Tensor:
        """Repetition over prompt and output (CTRL), then frequency and presence over output (OpenAI)."""
        assert self._prompt_rV is not None and self._counts_rV is not None
        device = logits_mV.device
        rows_m = _on_device([state.row for state in states], device)
        values = [(s.params.repetition_penalty, s.params.frequency_penalty, s.params.presence_penalty) for s in states]
        repetition, frequency, presence = _on_device(values, device, torch.float32).unsqueeze(2).unbind(1)
        counts_mV = self._counts_rV[rows_m]
        in_output_mV = counts_mV > 0
        seen_mV = self._prompt_rV[rows_m] | in_output_mV
        repeated_mV = torch.where(logits_mV > 0, logits_mV / repetition, logits_mV * repetition)
        return torch.where(seen_mV, repeated_mV, logits_mV) - frequency * counts_mV - presence * in_output_mV


def _on_device(values: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return upload(torch.tensor(values, dtype=dtype), device)


def _filter(logits_mV: torch.Tensor, params: Sequence[SamplingParams], kernels: Kernels) -> torch.Tensor:
    """(logits - maximum) / temperature, and -inf for what min_p, top_k and top_p drop, which is never the maximum."""
    device = logits_mV.device
    # Less the maximum first, the likeliest score is 0 at any temperature that float32 can tell from 0.
    temperature = _on_device([max(p.temperature, 1e-30) for p in params], device, torch.float32).unsqueeze(1)
    scores_mV = (logits_mV - logits_mV.amax(dim=-1, keepdim=True)) / temperature
    if any(p.min_p > 0 for p in params):
        floor = _on_device([p.min_p for p in params], device, torch.float32).log().unsqueeze(1)
        scores_mV = scores_mV.masked_fill(scores_mV < floor, -torch.inf)
    vocab_size = logits_mV.shape[1]
    limited = [row for row, p in enumerate(params) if 0 < p.top_k < vocab_size]
    if limited:
        rows, most = _on_device(limited, device), max(params[row].top_k for row in limited)
        ks = _on_device([params[row].top_k for row in limited], device).unsqueeze(1)
        some_mV = scores_mV[rows]
        highest = some_mV.topk(most, dim=-1).values
        scores_mV[rows] = some_mV.masked_fill(some_mV < highest.gather(1, ks - 1), -torch.inf)
    nucleus = [row for row, p in enumerate(params) if p.top_p < 1]
    if nucleus:
        rows = _on_device(nucleus, device)
        top_p_m = _on_device([params[row].top_p for row in nucleus], device, torch.float64)
        some_mV = scores_mV[rows]
        scores_mV[rows] = some_mV.masked_fill(
            some_mV < kernels.nucleus_floor(some_mV, top_p_m).unsqueeze(1), -torch.inf
        )
    return scores_mV


def _inverse_cdf(scores_mV: torch.Tensor, uniforms: Sequence[float]) -> torch.Tensor:
    """The token at which the cumulative distribution of softmax(scores) passes each uniform: int64 [m].

    In float64, so that how a device splits the sum does not decide which token is drawn.
    """
    cumulative_mV = scores_mV.double().exp().cumsum(dim=-1)
    total_m1 = cumulative_mV[:, -1:]
    uniforms_m1 = _on_device(uniforms, scores_mV.device, torch.float64).unsqueeze(1)
    # Rounding could carry the product to the total itself, which no token passes.
    targets_m1 = torch.minimum(uniforms_m1 * total_m1, torch.nextafter(total_m1, torch.zeros_like(total_m1)))
    tokens_m = torch.searchsorted(cumulative_mV, targets_m1, right=True).squeeze(1)
    # Where everything is -inf there is nothing to pass; a request may ban the whole vocabulary.
    return tokens_m.clamp(max=scores_mV.shape[1] - 1)


def _logprobs(logits_mV: torch.Tensor, tokens_m: torch.Tensor, most: int) -> tuple[torch.Tensor, ...]:
    """Of each row the log-probability of a token [m], and those [m, k] of the likeliest tokens, and these [m, k]."""
    logprobs_mV = logits_mV.log_softmax(dim=-1)
    chosen_m = logprobs_mV.gather(1, tokens_m.unsqueeze(1)).squeeze(1)
    return (chosen_m, *logprobs_mV.topk(min(most, logits_mV.shape[1]), dim=-1))


def _entries(tokens: Sequence[int], nums: Sequence[int], parts: Sequence[torch.Tensor]) -> list[TokenLogprob]:
    """What `_logprobs` gave for `tokens`, of each as many likely ones as it wants."""
    chosen, values, indices = (part.tolist() for part in parts)
    return [
        TokenLogprob(token, chosen[row], tuple(zip(indices[row][:num], values[row][:num], strict=True)))
        for row, (token, num) in enumerate(zip(tokens, nums, strict=True))
    ]
