"""Workloads small enough for tests, what to draw them from, and checks of what they share and when they are sent."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import strategies as st

from splash.workload import Feed, Requests, load
from splash.workload.distributions import Constant, Empirical, Lognormal, Pareto, Uniform
from splash.workload.load import KINDS

VOCAB = 1000
SMALL = {
    "fixed": ["workload.num_requests=40", "workload.shared_prefix=300"],
    "poisson": ["workload.num_requests=40", "workload.shared_prefix=300", "workload.prefix_groups=3"],
    "bursts": ["workload.num_requests=300"],
    "rl_rollout": ["workload.num_prompts=5", "workload.samples=4"],
    "agentic": ["workload.num_sessions=8", "workload.system_prompt=300", "workload.num_systems=2"],
    "trace": ["workload.max_requests=40"],
    "phases": [
        "workload.parts.rollout.num_prompts=3",
        "workload.parts.rollout.samples=4",
        "workload.parts.agents.num_sessions=4",
        "workload.parts.documents={num_requests: 3, input: 90, concurrency: 2}",
        "workload.parts.chat={num_requests: 5, input: 40}",
    ],
}
lengths = st.integers(1, 60)
distributions = st.one_of(
    st.builds(Constant, st.integers(0, 50)),
    st.builds(lambda low, more: Uniform(low, low + more), st.integers(0, 20), st.integers(0, 40)),
    st.builds(
        lambda average, sigma, high: Lognormal(average, sigma, 0, high),
        st.floats(1, 60),
        st.floats(0.1, 2),
        st.integers(1, 200),
    ),
    st.builds(lambda alpha, low, more: Pareto(alpha, low, low + more), st.floats(0.5, 4), lengths, st.integers(0, 200)),
    st.builds(lambda samples: Empirical(tuple(samples)), st.lists(lengths, min_size=1, max_size=6)),
)
agentic = st.builds(
    KINDS["agentic"],
    seed=st.integers(0, 2**63 - 1),
    num_sessions=st.integers(1, 12),
    rate=st.floats(0.1, 10),
    turns=distributions,
    input=distributions,
    tool=distributions,
    output=distributions,
    think=distributions,
    system_prompt=st.integers(0, 40),
    num_systems=st.integers(1, 3),
    max_context=st.integers(42, 400),
)


def small(name: str, *more: str) -> Requests:
    return load(name, [*SMALL[name], *more]).requests()


def columns(requests: Requests) -> dict[str, np.ndarray]:
    return {key: value for key, value in vars(requests).items() if isinstance(value, np.ndarray)}


def common(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the common start of two arrays."""
    size = min(len(a), len(b))
    differ = np.flatnonzero(a[:size] != b[:size])
    return int(differ[0]) if len(differ) else size


def check_sharing(requests: Requests, block_size: int) -> None:
    """`shared_len` and `block_keys` against the tokens themselves.

    Of the many tokens here, none equals another's by chance at a boundary for long: a vocabulary of 2^31 sees to it.
    """
    vocab = 2**31
    prompts = [requests.tokens(i, vocab) for i in range(len(requests))]
    whole = [
        np.concatenate([prompt, requests.output_tokens(i, vocab)]) if requests.continues[i] else prompt
        for i, prompt in enumerate(prompts)
    ]
    for i, prompt in enumerate(prompts):
        assert len(prompt) == requests.input_len[i]
        assert requests.shared_len[i] == max((common(prompt, whole[j]) for j in range(i)), default=0)
    for output in (False, True):
        offsets, keys = requests.block_keys(block_size, output=output)
        named: dict[int, bytes] = {}
        contents: dict[bytes, int] = {}
        for i, prompt in enumerate(prompts):
            full = np.concatenate([prompt, requests.output_tokens(i, vocab)]) if output else prompt
            mine = keys[offsets[i] : offsets[i + 1]].tolist()
            assert len(mine) == len(full) // block_size
            for number, key in enumerate(mine):
                start = full[: (number + 1) * block_size].tobytes()
                assert named.setdefault(key, start) == start
                assert contents.setdefault(start, key) == key


def replay(requests: Requests, service_s: float) -> dict[int, tuple[float, float]]:
    """Serve every request for `service_s`: index -> (sent, finished)."""
    feed, now, served = Feed(requests), 0.0, {}
    running: list[tuple[float, int]] = []
    while not feed.exhausted or running:
        for index, due in feed.take(now):
            assert due <= now and index not in served
            served[index] = (now, now + service_s)
            running.append((now + service_s, index))
        assert feed.in_flight == len(running) <= requests.most_in_flight
        if running and min(running)[0] <= feed.next_time():
            now, index = min(running)
            running.remove((now, index))
            feed.finish(index, now)
        elif not feed.exhausted:
            assert now <= feed.next_time() < math.inf, "nothing runs and nothing falls due"
            now = feed.next_time()
    return served
