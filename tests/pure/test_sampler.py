"""The sampler against slow, plain references, and against transformers for the repetition penalty."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from splash.core.request import SamplingParams, TokenLogprob
from splash.core.step import NewRequest
from splash.engine.sampler import Sampler, _filter, _inverse_cdf, uniform
from splash.platform.cpu.kernels import CpuKernels

VOCABULARY = 40
EOS = 3


def sampler_of(*requests: tuple[SamplingParams, int], prompt: tuple[int, ...] = (1, 2)) -> Sampler:
    """A sampler with requests 0, 1, ... of these parameters and seeds."""
    sampler = Sampler({EOS}, CpuKernels())
    for id, (params, seed) in enumerate(requests):
        sampler.add(NewRequest(id, prompt, params, seed))
    return sampler


def random_logits(rows: int, seed: int, vocab_size: int = VOCABULARY) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 2


def reference_probabilities(logits: list[float], params: SamplingParams) -> list[float]:
    """Temperature, min_p, top_k, top_p, one token at a time."""
    highest = max(logits)
    weights = [math.exp((x - highest) / params.temperature) for x in logits]
    kept = [w if w >= params.min_p else 0.0 for w in weights]
    if 0 < params.top_k < len(kept):
        kth = sorted(kept, reverse=True)[params.top_k - 1]
        kept = [w if w >= kth else 0.0 for w in kept]
    if params.top_p < 1:
        kept = [w if sum(v for v in kept if v > w) < params.top_p * sum(kept) else 0.0 for w in kept]
    return [w / sum(kept) for w in kept]


def reference_token(probabilities: list[float], u: float) -> int:
    cumulative = 0.0
    for token, probability in enumerate(probabilities):
        cumulative += probability
        if cumulative > u:
            return token
    return max(token for token, probability in enumerate(probabilities) if probability)


filters = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.2, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 39, 40, 1000]),
    top_p=st.sampled_from([0.01, 0.3, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)


@given(batch=st.lists(st.tuples(filters, st.integers(-(2**63), 2**63 - 1)), min_size=1, max_size=6), draw=st.data())
def test_filters_and_draws_match_the_reference(batch: list[tuple[SamplingParams, int]], draw: st.DataObject) -> None:
    logits = random_logits(len(batch), draw.draw(st.integers(0, 1000)))
    positions = [draw.draw(st.integers(0, 10**6)) for _ in batch]
    before = logits.clone()
    tokens, logprobs = sampler_of(*batch).sample(logits, list(enumerate(positions))).wait()
    assert torch.equal(logits, before)
    assert logprobs == [None] * len(batch)
    for row, (params, seed) in enumerate(batch):
        probabilities = reference_probabilities(logits[row].double().tolist(), params)
        u = uniform(seed, positions[row])
        # A draw within float32 of an edge may fall to either side of it.
        assert tokens[row] in {reference_token(probabilities, min(max(u + e, 0), 1)) for e in (-1e-6, 0, 1e-6)}


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5, top_p=0.9),
        SamplingParams(temperature=1.5, top_k=10),
        SamplingParams(min_p=0.1),
        SamplingParams(temperature=2.0, top_k=12, top_p=0.8, min_p=0.02),
    ],
)
def test_draws_follow_the_distribution(params: SamplingParams) -> None:
    num_draws = 20_000
    logits = random_logits(1, 5)
    probabilities = torch.tensor(reference_probabilities(logits[0].double().tolist(), params))
    sampler = sampler_of(*[(params, 77 * seed) for seed in range(100)])
    counts = torch.zeros(VOCABULARY, dtype=torch.int64)
    for position in range(num_draws // 100):
        tokens, _ = sampler.sample(logits.expand(100, -1), [(id, position) for id in range(100)]).wait()
        counts += torch.bincount(torch.tensor(tokens), minlength=VOCABULARY)
    possible = probabilities > 0
    assert counts[~possible].sum() == 0
    expected = probabilities[possible] * num_draws
    chi_square = float(((counts[possible] - expected) ** 2 / expected).sum())
    freedom = int(possible.sum()) - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * max(freedom, 1)) + 4


@pytest.mark.parametrize(("u", "token"), [(0.0, 1), (0.5 - 2**-53, 1), (0.5, 3), (1 - 2**-53, 3)])
def test_draws_at_an_edge_fall_on_tokens_that_are_possible(u: float, token: int) -> None:
    never = -math.inf
    assert _inverse_cdf(torch.tensor([[never, 0.0, never, 0.0, never]]), [u]).tolist() == [token]


@pytest.mark.parametrize("spread", [0.0, 0.01, 3.0])
@pytest.mark.parametrize("top_p", [0.2, 0.95])
def test_nucleus_of_a_large_vocabulary(spread: float, top_p: float) -> None:
    scores = random_logits(1, 0, 1000) * spread
    (row,) = _filter(scores, [SamplingParams(top_p=top_p)], CpuKernels()).tolist()
    expected = reference_probabilities(scores[0].double().tolist(), SamplingParams(top_p=top_p))
    assert [x > -math.inf for x in row] == [probability > 0 for probability in expected]


def test_uniforms_are_uniform_and_independent_along_seeds_and_positions() -> None:
    draws = [[uniform(seed, position) for position in range(200)] for seed in range(200)]
    grid = torch.tensor(draws, dtype=torch.float64)
    assert float(grid.min()) >= 0 and float(grid.max()) < 1
    assert len(grid.unique()) > 0.99 * grid.numel()
    counts = torch.histc(grid.float(), bins=50, min=0, max=1)
    assert float(((counts - 800) ** 2 / 800).sum()) < 49 + 4 * math.sqrt(98)
    centred = (grid - 0.5) * math.sqrt(12)
    for shifted in (centred[:, 1:] * centred[:, :-1], centred[1:] * centred[:-1], centred[1:, :-1] * centred[:-1, 1:]):
        assert abs(float(shifted.mean())) < 4 / math.sqrt(shifted.numel())
    assert uniform(-1, 0) == uniform(2**64 - 1, 0)


@settings(max_examples=50)
@given(order=st.permutations(range(6)), size=st.integers(1, 6))
def test_a_token_does_not_depend_on_the_rest_of_the_batch(order: list[int], size: int) -> None:
    kinds = [
        SamplingParams(temperature=0.0),
        SamplingParams(),
        SamplingParams(top_p=0.7),
        SamplingParams(top_k=5, presence_penalty=1.0),
        SamplingParams(temperature=0.0, repetition_penalty=1.5, logprobs=2),
        SamplingParams(min_p=0.1, min_tokens=9, max_tokens=9, logprobs=5),
    ]
    logits = random_logits(6 * 8, 3).view(8, 6, VOCABULARY)
    alone = [sampler_of(*[(params, 11 + id) for id, params in enumerate(kinds)]) for _ in kinds]
    together = sampler_of(*[(params, 11 + id) for id, params in enumerate(kinds)])
    chosen = order[:size]
    for position in range(8):
        tokens, logprobs = together.sample(logits[position, chosen], [(id, position) for id in chosen]).wait()
        for row, id in enumerate(chosen):
            (token,), (logprob,) = alone[id].sample(logits[position, id : id + 1], [(id, position)]).wait()
            assert token == tokens[row]
            assert (logprob is None) == (logprobs[row] is None)
            if logprob is not None:
                assert [t for t, _ in logprob.top] == [t for t, _ in logprobs[row].top]


def test_seed_and_position_decide_the_draw() -> None:
    logits = torch.zeros(1, 10_000)
    draws = {
        (seed, position): sampler_of((SamplingParams(), seed)).sample(logits, [(0, position)]).wait()[0][0]
        for seed in range(5)
        for position in range(5)
    }
    assert len(set(draws.values())) > 20
    for (seed, position), token in draws.items():
        assert sampler_of((SamplingParams(), seed)).sample(logits, [(0, position)]).wait()[0] == [token]
        assert token == int(uniform(seed, position) * 10_000)


@pytest.mark.parametrize("other", [SamplingParams(temperature=0.0), SamplingParams()])
def test_greedy_takes_the_lowest_of_equals(other: SamplingParams) -> None:
    logits = random_logits(2, 0)
    logits[0, [31, 7, 12]] = 50.0
    tokens, _ = sampler_of((SamplingParams(temperature=0.0), 0), (other, 1)).sample(logits, [(0, 0), (1, 0)]).wait()
    assert tokens[0] == 7


@pytest.mark.parametrize("temperature", [1e-300, 1e-38, 1e-6])
def test_temperatures_near_zero_are_nearly_greedy(temperature: float) -> None:
    logits = random_logits(8, 1) * 100
    sampler = sampler_of(*[(SamplingParams(temperature=temperature, top_p=0.9, min_p=0.1), id) for id in range(8)])
    assert sampler.sample(logits, [(id, 0) for id in range(8)]).wait()[0] == logits.argmax(dim=-1).tolist()


def test_repetition_penalty_is_that_of_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    generator = random.Random(0)
    prompt = tuple(generator.randrange(VOCABULARY) for _ in range(5))
    penalties = [0.5, 1.3, 2.0]
    sampler = sampler_of(
        *[(SamplingParams(temperature=0.0, repetition_penalty=p), 0) for p in penalties], prompt=prompt
    )
    seen = [list(prompt) for _ in penalties]
    for step in range(30):
        logits = random_logits(3, step)
        tokens, _ = sampler.sample(logits, [(id, step) for id in range(3)]).wait()
        for id, penalty in enumerate(penalties):
            reference = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([seen[id]]), logits[id : id + 1].clone())
            assert tokens[id] == int(reference.argmax())
            seen[id].append(tokens[id])


def test_presence_and_frequency_penalties_count_output_only() -> None:
    presence, frequency = 0.7, 0.4
    params = SamplingParams(temperature=0.0, presence_penalty=presence, frequency_penalty=frequency)
    sampler = sampler_of((SamplingParams(), 1), (params, 0), prompt=(0, 0, 0))
    counts = [0] * 4
    logits = torch.tensor([[2.0, 1.5, 1.0, -1.0]])
    chosen = []
    for step in range(12):
        tokens, _ = sampler.sample(logits.expand(2, -1), [(0, step), (1, step)]).wait()
        scores = [x - frequency * c - presence * (c > 0) for x, c in zip(logits[0].tolist(), counts, strict=True)]
        assert tokens[1] == scores.index(max(scores))
        counts[tokens[1]] += 1
        chosen.append(tokens[1])
    assert chosen[0] == 0 and {1, 2} <= set(chosen)


def test_penalty_tables_are_clean_for_the_next_request() -> None:
    params = SamplingParams(temperature=0.0, repetition_penalty=100.0, presence_penalty=2.0)
    sampler = Sampler({EOS}, CpuKernels())
    logits = torch.tensor([[1.0, 0.9, 0.8, 0.7, 0.6]])
    for id in range(20):
        sampler.add(NewRequest(id, (4 * (id % 2),), params, 0))
        expected = [0, 1, 2] if id % 2 else [1, 2, 3]
        assert [sampler.sample(logits, [(id, step)]).wait()[0][0] for step in range(3)] == expected
        if id % 3:
            sampler.remove(id)


def test_min_tokens_holds_back_end_of_sequence_and_stop_tokens() -> None:
    logits = torch.zeros(3, VOCABULARY)
    logits[:, EOS], logits[:, 9], logits[:, 5] = 30.0, 20.0, 10.0
    fields = {"min_tokens": 2, "stop_token_ids": (9, -1, VOCABULARY)}
    sampler = sampler_of(
        (SamplingParams(temperature=0.0, **fields), 0),
        (SamplingParams(temperature=0.1, **fields), 0),
        (SamplingParams(temperature=0.0, ignore_eos=True, **fields), 0),
    )
    got = [sampler.sample(logits, [(id, step) for id in range(3)]).wait()[0] for step in range(3)]
    assert got == [[5, 5, EOS], [5, 5, EOS], [EOS, EOS, EOS]]
    alone = sampler_of((SamplingParams(temperature=0.0, **fields), 0))
    assert [alone.sample(logits[:1], [(0, step)]).wait()[0] for step in range(3)] == [[5], [5], [EOS]]


def test_banning_the_whole_vocabulary_still_gives_a_token() -> None:
    fields = {"min_tokens": 1, "stop_token_ids": tuple(range(VOCABULARY))}
    requests = [(SamplingParams(temperature=t, top_p=p, **fields), 0) for t in (0.0, 1.0) for p in (0.5, 1.0)]
    tokens, _ = sampler_of(*requests).sample(random_logits(4, 0), [(id, 0) for id in range(4)]).wait()
    assert all(0 <= token < VOCABULARY for token in tokens)


def test_logprobs_are_those_of_the_logits_as_they_came() -> None:
    logits = random_logits(4, 2)
    expected = logits.double().log_softmax(dim=-1)
    sampler = sampler_of(
        (SamplingParams(temperature=0.3, top_k=2, logprobs=0), 5),
        (SamplingParams(temperature=0.0, repetition_penalty=5.0, logprobs=3), 6),
        (SamplingParams(), 7),
        (SamplingParams(logprobs=20, min_tokens=1), 8),
        prompt=tuple(range(VOCABULARY)),
    )
    tokens, logprobs = sampler.sample(logits, [(id, 4) for id in range(4)]).wait()
    assert logprobs[2] is None
    for row, num in ((0, 0), (1, 3), (3, 20)):
        got = logprobs[row]
        assert isinstance(got, TokenLogprob)
        assert got.token == tokens[row]
        assert got.logprob == pytest.approx(float(expected[row, tokens[row]]), abs=1e-5)
        values, indices = expected[row].sort(descending=True)
        assert [token for token, _ in got.top] == indices[:num].tolist()
        assert [value for _, value in got.top] == pytest.approx(values[:num].tolist(), abs=1e-5)


def test_more_logprobs_than_the_vocabulary_has() -> None:
    _, (logprob,) = sampler_of((SamplingParams(logprobs=20), 0)).sample(random_logits(1, 0, 6), [(0, 0)]).wait()
    assert len(logprob.top) == 6


def test_empty_batch() -> None:
    assert sampler_of().sample(torch.empty(0, VOCABULARY), []).wait() == ([], [])


def test_requests_are_added_once_and_forgotten_when_removed() -> None:
    sampler = sampler_of((SamplingParams(), 0))
    with pytest.raises(AssertionError, match="added before"):
        sampler.add(NewRequest(0, (1,), SamplingParams(), 0))
    sampler.remove(0)
    with pytest.raises(KeyError):
        sampler.sample(random_logits(1, 0), [(0, 0)]).wait()


kinds = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5]),
    min_tokens=st.sampled_from([0, 2]),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    presence_penalty=st.sampled_from([0.0, 1.0]),
    frequency_penalty=st.sampled_from([0.0, 1.0]),
    logit_bias=st.sampled_from([(), ((7, 50.0),)]),
    logprobs=st.sampled_from([None, 0, 2]),
    prompt_logprobs=st.sampled_from([None, 1]),
)


@given(kinds, st.integers(0, 1000))
def test_greedy_requests_need_nothing_but_the_most_likely_token(params: SamplingParams, seed: int) -> None:
    logits = random_logits(1, seed)
    logits[0, EOS] = 20.0  # the token that `min_tokens` forbids
    tokens, logprobs = sampler_of((params, seed)).sample(logits, [(0, 2)]).wait()
    if params.is_greedy:
        assert (tokens, logprobs) == sampler_of((params, seed)).take(logits.argmax(dim=-1), [0]).wait()
    plain = SamplingParams(temperature=0.0)
    asked = (params.temperature, params.min_tokens, params.has_penalties, params.logit_bias, params.logprobs)
    unlike = asked != (0.0, 0, False, (), None) or params.prompt_logprobs is not None
    assert plain.is_greedy and params.is_greedy != unlike
