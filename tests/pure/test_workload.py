"""Workloads: same seed, same requests; what is shared is shared exactly; nothing waits for what comes later."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splash.core.errors import ConfigError
from splash.settings import CONF_DIR, options
from splash.workload import Feed, Requests, Trace, Workload, from_mapping, load, summarise, write_trace
from splash.workload.__main__ import main
from splash.workload.distributions import Constant, Distribution, Empirical, Lognormal, Pareto, Uniform
from splash.workload.draws import Draw, fold, hashed, uniform
from splash.workload.load import KINDS
from splash.workload.trace import synthetic_trace
from tests.workloads import SMALL, VOCAB, agentic, check_sharing, columns, distributions, replay, small


def test_every_kind_has_a_file_and_every_file_spells_out_its_options() -> None:
    assert set(options("workload")) == set(KINDS) == set(SMALL)
    for name, cls in KINDS.items():
        keys = {line.partition(":")[0] for line in (CONF_DIR / "workload" / f"{name}.yaml").read_text().splitlines()}
        assert keys - {"kind"} >= {field.name for field in dataclasses.fields(cls)}


@pytest.mark.parametrize("name", SMALL)
def test_the_same_seed_gives_the_same_requests_and_another_seed_others(name: str) -> None:
    first, again, other = small(name), small(name), small(name, "workload.seed=1")
    for key, column in columns(first).items():
        np.testing.assert_array_equal(column, getattr(again, key))
    last = len(first) - 1
    np.testing.assert_array_equal(first.tokens(last, VOCAB), again.tokens(last, VOCAB))
    np.testing.assert_array_equal(first.output_tokens(last, VOCAB), again.output_tokens(last, VOCAB))
    assert not np.array_equal(first.tokens(0, VOCAB), other.tokens(0, VOCAB))
    if name not in ("fixed", "trace"):
        assert not np.array_equal(first.output_len[:20], other.output_len[:20])


@pytest.mark.parametrize("name", SMALL)
def test_chunks_are_slices_of_the_whole(name: str) -> None:
    requests = small(name)
    whole = list(requests.arrivals())
    assert [*requests.arrivals(0, 7), *requests.arrivals(7, 8), *requests.arrivals(8)] == whole
    assert [arrival.index for arrival in whole] == list(range(len(requests)))
    assert [arrival.prompt.length for arrival in whole] == requests.input_len.tolist()
    offsets, keys = requests.block_keys(64)
    parts = [requests.block_keys(64, 0, 7), requests.block_keys(64, 7, 7), requests.block_keys(64, 7)]
    np.testing.assert_array_equal(np.concatenate([part[1] for part in parts]), keys)
    np.testing.assert_array_equal(parts[2][0], offsets[7:] - offsets[7])


@pytest.mark.parametrize("name", ["fixed", "poisson", "bursts"])
def test_a_longer_run_starts_like_a_shorter_one(name: str) -> None:
    shorter, longer = small(name, "workload.num_requests=9"), small(name, "workload.num_requests=30")
    for field in ("time_s", "input_len", "output_len", "session"):
        np.testing.assert_array_equal(getattr(shorter, field), getattr(longer, field)[:9])
    np.testing.assert_array_equal(shorter.tokens(8, VOCAB), longer.tokens(8, VOCAB))


@pytest.mark.parametrize("name", SMALL)
def test_sharing_is_exact(name: str) -> None:
    check_sharing(small(name), 96)


@settings(max_examples=100, deadline=None)
@given(
    prompts=st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4)), min_size=1, max_size=4), max_size=8),
    block_size=st.integers(1, 4),
    continues=st.booleans(),
)
def test_sharing_is_exact_however_prompts_are_put_together(
    prompts: list[list[tuple[int, int]]], block_size: int, continues: bool
) -> None:
    parts = [part for prompt in prompts for part in prompt]
    count = len(prompts)
    last = np.array([prompt[-1][0] for prompt in prompts], np.uint64)
    requests = Requests(
        time_s=np.zeros(count),
        after=np.full(count, -1),
        delay_s=np.zeros(count),
        output_len=np.arange(count) % 3 + 1,
        priority=np.zeros(count, np.int64),
        session=np.arange(count),
        segment_start=np.cumsum([0, *map(len, prompts)]),
        segment_stream=np.array([stream for stream, _ in parts], np.uint64),
        segment_len=np.array([length for _, length in parts], np.int64),
        output_stream=last if continues else hashed(fold(1), np.arange(count)),
    )
    check_sharing(requests, block_size)


@settings(max_examples=60, deadline=None)
@given(workload=agentic, block_size=st.integers(1, 50))
def test_sessions_share_exactly_wait_for_earlier_turns_and_keep_their_bounds(workload: Any, block_size: int) -> None:
    requests = workload.requests()
    check_sharing(requests, block_size)
    assert np.all(np.diff(requests.time_s) >= 0)
    assert np.all(requests.after < np.arange(len(requests)))
    assert np.all(requests.input_len + requests.output_len <= workload.max_context)
    assert set(requests.session.tolist()) == set(range(workload.num_sessions))
    for session in range(workload.num_sessions):
        turns = np.flatnonzero(requests.session == session)
        assert requests.after[turns].tolist() == [-1, *turns[:-1].tolist()]
        before = requests.input_len[turns[:-1]] + requests.output_len[turns[:-1]]
        assert np.all(requests.input_len[turns[1:]] >= before)
        np.testing.assert_array_equal(requests.shared_len[turns[1:]], before)
    served = replay(requests, 0.75)
    assert len(served) == len(requests)
    for index, (sent, _) in served.items():
        after = int(requests.after[index])
        due = requests.time_s[index] if after < 0 else served[after][1] + requests.delay_s[index]
        assert sent == pytest.approx(due)


@settings(max_examples=60, deadline=None)
@given(distribution=distributions, seed=st.integers(0, 2**32))
def test_draws_keep_their_bounds_and_do_not_depend_on_their_neighbours(distribution: Distribution, seed: int) -> None:
    key, numbers = fold(seed, Draw.OUTPUT_LEN), np.arange(50)
    values, counts = distribution.values(key, numbers), distribution.counts(key, numbers)
    low, high = getattr(distribution, "low", 0), getattr(distribution, "high", None) or 60
    assert np.all((values >= low) & (values <= high)) and np.all((counts >= 1) & (counts <= max(1, high)))
    np.testing.assert_array_equal(distribution.values(key, numbers[20:31]), values[20:31])
    np.testing.assert_array_equal(distribution.counts(key, numbers[::-1]), counts[::-1])


@pytest.mark.parametrize(
    "distribution",
    [
        Constant(37),
        Uniform(10, 90),
        Lognormal(200, 0.8),
        Lognormal(4000, 1.2, 16, 8192),
        Pareto(2.5, 100, 1e9),
        Pareto(0.9, 100, 20000),
        Pareto(1.0, 100, 20000),
        Empirical((10, 200, 3000), (5, 3, 2)),
        Empirical((10, 20)),
    ],
    ids=repr,
)
def test_means_are_what_they_say(distribution: Distribution) -> None:
    numbers = np.arange(400_000)
    drawn = distribution.values(fold(3, Draw.OUTPUT_LEN), numbers)
    assert drawn.mean() == pytest.approx(distribution.mean(), rel=0.02)
    assert distribution.counts(fold(3, Draw.OUTPUT_LEN), numbers).mean() == pytest.approx(drawn.mean(), rel=0.01)


def test_a_uniform_count_is_as_likely_at_the_ends() -> None:
    _, seen = np.unique(Uniform(3, 6).counts(1, np.arange(40_000)), return_counts=True)
    assert len(seen) == 4 and seen.min() > 0.95 * seen.max()


def test_hashes_spread_over_the_unit_interval_and_follow_their_key() -> None:
    drawn = uniform(fold(1, 2), np.arange(100_000))
    assert drawn.min() > 0 and drawn.max() < 1
    assert np.histogram(drawn, 10, (0, 1))[0] == pytest.approx(10_000, rel=0.05)
    assert fold(1, 2) != fold(2, 1)
    assert len(np.unique(hashed(fold(7), np.arange(100_000)))) == 100_000
    # The sequence of SplitMix64 for seed 1234567, as its authors' program prints it.
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert hashed(1234567, np.arange(4)).tolist() == expected


def test_poisson_arrivals_have_their_rate_and_spread() -> None:
    gaps = np.diff(small("poisson", "workload.num_requests=100000", "workload.rate=8").time_s)
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.02) and gaps.std() == pytest.approx(1 / 8, rel=0.02)


@pytest.mark.parametrize("rate_off", [0.0, 1.0])
def test_bursts_have_both_rates(rate_off: float) -> None:
    options = ["rate_on=20", f"rate_off={rate_off}", "on_s=5", "off_s=15", "num_requests=60000"]
    time_s = load("bursts", [f"workload.{option}" for option in options]).requests().time_s
    inside = (time_s % 20 < 5).sum()
    periods = time_s[-1] / 20
    assert inside / (periods * 5) == pytest.approx(20, rel=0.03)
    assert (len(time_s) - inside) / (periods * 15) == pytest.approx(rate_off, rel=0.1, abs=0.01)
    assert np.all(np.diff(time_s) >= 0)


def test_shared_prefixes_are_as_long_and_as_many_as_asked() -> None:
    requests = small("poisson", "workload.input=400")
    starts = {requests.tokens(i, VOCAB)[:300].tobytes() for i in range(len(requests))}
    assert len(starts) == 3
    assert set(requests.shared_len.tolist()) == {0, 300} and (requests.shared_len == 0).sum() == 3
    short = small("poisson", "workload.input=100")
    assert short.input_len.tolist() == [100] * 40 and len({short.tokens(i, VOCAB).tobytes() for i in range(40)}) == 3


def test_rollout_samples_share_their_prompt_and_nothing_else() -> None:
    requests = small("rl_rollout")
    assert len(requests) == 20 and not requests.time_s.any()
    for i in range(20):
        np.testing.assert_array_equal(requests.tokens(i, VOCAB), requests.tokens(i - i % 4, VOCAB))
    assert len({requests.tokens(i, VOCAB).tobytes() for i in range(20)}) == 5
    assert len({requests.output_tokens(i, VOCAB).tobytes() for i in range(20)}) == 20
    capped = load("rl_rollout").requests().output_len
    assert capped.max() == 32768 and np.median(capped) < 0.7 * capped.mean()


@pytest.mark.parametrize("concurrency", [1, 3, None])
def test_a_closed_loop_keeps_its_places_filled(concurrency: int | None) -> None:
    requests = small("fixed", f"workload.concurrency={'null' if concurrency is None else concurrency}")
    served = replay(requests, 2.0)
    assert max(end for _, end in served.values()) == 2.0 * math.ceil(40 / (concurrency or 40))
    assert sorted(served, key=lambda index: (served[index][0], index)) == list(range(40))


def test_a_feed_releases_nothing_before_its_time() -> None:
    requests = small("agentic")
    feed = Feed(requests)
    first = feed.next_time()
    assert feed.take(first - 1e-6) == [] and [index for index, _ in feed.take(first)] == [0]
    roots = (requests.after < 0).sum()
    assert len(feed.take(math.inf)) == roots - 1
    assert feed.next_time() == math.inf and not feed.exhausted
    follower = int(np.flatnonzero(requests.after == 0)[0])
    feed.finish(0, 5000.0)
    assert feed.take(math.inf) == [(follower, 5000.0 + requests.delay_s[follower])]


def test_tokens_stay_inside_the_vocabulary() -> None:
    requests = small("poisson", "workload.input=5000")
    tokens = requests.tokens(0, 64)
    assert tokens.min() == 16 and tokens.max() == 63
    assert requests.tokens(0, 3, first=0).max() == 2
    with pytest.raises(ConfigError, match="vocab_size: must be above 16"):
        requests.tokens(0, 16)


def test_the_shipped_trace_is_what_its_seed_gives(tmp_path: Path) -> None:
    shipped = CONF_DIR / "workload" / "traces" / "synthetic.jsonl"
    assert shipped.stat().st_size < 200_000
    write_trace(synthetic_trace(), tmp_path / "again.jsonl")
    assert (tmp_path / "again.jsonl").read_text() == shipped.read_text()


def test_a_written_trace_reads_back_with_its_sharing(tmp_path: Path) -> None:
    requests = small("agentic")
    path = tmp_path / "trace.jsonl"
    write_trace(requests, path, block_size=64)
    back = Trace(path=path, block_size=64).requests()
    np.testing.assert_array_equal(back.input_len, requests.input_len)
    np.testing.assert_array_equal(back.output_len, requests.output_len)
    np.testing.assert_allclose(back.time_s, requests.time_s, atol=6e-4)
    for index in range(len(requests)):
        keys, again = (which.block_keys(64, index, index + 1)[1] for which in (requests, back))
        earlier, earlier_again = (set(which.block_keys(64, 0, index)[1].tolist()) for which in (requests, back))
        assert [key in earlier for key in keys.tolist()] == [key in earlier_again for key in again.tolist()]
    assert back.shared_len.sum() > 0


LINES = [
    {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [0, 1]},
    {"timestamp": 2500, "input_length": 1500, "output_length": 50, "hash_ids": [0, 1, 2]},
    {"timestamp": 1500.5, "input_length": 10, "output_length": 1},
]


def written(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_a_trace_is_replayed_in_order_scaled_and_cut(tmp_path: Path) -> None:
    path = written(tmp_path / "t.jsonl", *LINES, "")
    requests = Trace(path=path).requests()
    assert requests.time_s.tolist() == [0, 1.5005, 2.5]
    assert requests.input_len.tolist() == [1000, 10, 1500] and requests.output_len.tolist() == [5, 1, 50]
    assert requests.shared_len.tolist() == [0, 0, 1000]
    check_sharing(requests, 128)
    fast = Trace(path=path, rate_scale=2, max_requests=2).requests()
    assert fast.time_s.tolist() == [0, 0.75025]
    cut = Trace(path=path, max_input_len=600, max_output_len=20).requests()
    assert cut.input_len.tolist() == [600, 10, 600] and cut.output_len.tolist() == [5, 1, 20]
    np.testing.assert_array_equal(cut.tokens(2, VOCAB), requests.tokens(2, VOCAB)[:600])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{oops", "line 2: no JSON object"),
        ("[1, 2]", "line 2: .*object"),
        ({**LINES[0], "input_length": "9"}, "line 2: input_length: .*got `str`"),
        ({**LINES[0], "timestamp": None}, "line 2: timestamp: "),
        ({**LINES[0], "timestamp": -1}, "line 2: timestamp: must be at least 0, not -1"),
        ({**LINES[0], "input_length": 0}, "line 2: input_length: must be between 1 and"),
        ({**LINES[0], "output_length": 0}, "line 2: output_length: must be between 1 and"),
        ({**LINES[0], "hash_ids": [0]}, "line 2: hash_ids: must be 2 for 1000 tokens in blocks of 512, not 1"),
        ({**LINES[0], "hash_ids": [0, -1]}, "line 2: hash_ids: must be between 0 and"),
        ({**LINES[0], "hash_ids": [0, "x"]}, "line 2: hash_ids: "),
        ({"timestamp": 0, "input_length": 1}, "line 2: output_length: .*missing"),
    ],
)
def test_a_malformed_line_is_named_with_its_field(tmp_path: Path, line: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Trace(path=written(tmp_path / "t.jsonl", LINES[0], line)).requests()


@pytest.mark.parametrize(("content", "message"), [(None, "cannot read"), ("\n", "holds no request")])
def test_a_missing_or_empty_trace_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "t.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        Trace(path=path).requests()


@pytest.mark.parametrize(
    ("name", "change", "field", "message"),
    [
        ("poisson", "rate=0", "workload.rate", "must be above 0, not 0"),
        ("poisson", "rtae=1", "workload.rtae", "did you mean rate"),
        ("poisson", "input=many", "workload.input", "must be a number or a mapping"),
        ("poisson", "input.kind=gamma", "workload.input.kind", "must be one of constant, uniform"),
        ("poisson", "input.sigma=-1", "workload.input.sigma", "must be above 0"),
        ("poisson", "output.high=1", "workload.output.high", r"between low \(4\)"),
        ("poisson", "num_requests=0", "workload.num_requests", "at least 1"),
        ("fixed", "concurrency=0", "workload.concurrency", "at least 1"),
        ("bursts", "on_s=0", "workload.on_s", "above 0"),
        ("agentic", "max_context=3000", "workload.max_context", "at least 3002"),
        ("trace", "rate_scale=0", "workload.rate_scale", "above 0"),
        ("trace", "kind=tracee", "workload.kind", "must be one of fixed"),
        ("phases", "parts.agents.rate=0", "workload.parts.agents.rate", "must be above 0, not 0"),
        ("phases", "parts.agents.kind=agent", "workload.parts.agents.kind", "must be one of fixed"),
        ("phases", "parts=4", "workload.parts", "must be a mapping of names to workloads, not 4"),
        ("phases", "parts.agents=4", "workload.parts.agents", "must be a mapping with a kind, not 4"),
        ("nothing", "seed=0", "workload", "unknown workload 'nothing'; choose one of agentic"),
    ],
)
def test_wrong_options_are_named(name: str, change: str, field: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        load(name, [f"workload.{change}"])
    assert refused.value.field == field


def test_descriptions_are_values() -> None:
    mapping = {
        "kind": "rl_rollout",
        "num_prompts": 2,
        "samples": 3,
        "input": 5,
        "output": {"kind": "constant", "value": 7},
    }
    workload = from_mapping(mapping)
    assert isinstance(workload, Workload) and workload == from_mapping(mapping) and hash(workload) == hash(workload)
    with pytest.raises(dataclasses.FrozenInstanceError):
        workload.seed = 3  # type: ignore[misc]
    with pytest.raises(ValueError, match="read-only"):
        workload.requests().output_len[0] = 1


def test_the_summary_counts(tmp_path: Path) -> None:
    summary = summarise(Trace(path=written(tmp_path / "t.jsonl", *LINES)).requests())
    assert (summary.num_requests, summary.num_sessions, summary.num_dependent) == (3, 3, 0)
    assert (summary.input_tokens, summary.output_tokens, summary.last_arrival_s) == (2510, 56, 2.5)
    assert summary.input_len.p50 == 1000 and summary.output_len.max == 50
    assert summary.shared_prefix_fraction == pytest.approx(1000 / 2510, abs=1e-4)
    assert (summary.num_phases, summary.concurrency) == (1, None)
    phases = summarise(small("phases"))
    assert (phases.num_phases, phases.concurrency) == (4, None) and "4 phases" in phases.table()
    assert summarise(small("phases", "~workload.parts.rollout", "~workload.parts.agents")).concurrency == 4
    agents = summarise(small("agentic"))
    assert agents.num_sessions == 8 and agents.num_dependent == agents.num_requests - 8


def test_the_command_prints_a_summary_and_names_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["workload=agentic", "workload.num_sessions=5", "format=json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_sessions"] == 5
    assert main(["workload=fixed"]) == 0
    assert "64 requests" in capsys.readouterr().out
    assert main([]) == 0
    assert "rl_rollout" in capsys.readouterr().out
    assert main(["workload=fixed", "workload.inptu=3"]) == 2
    assert "workload.inptu: unknown option; did you mean input?" in capsys.readouterr().err
    assert main(["workload=fixed", "format=xml"]) == 2
    assert "format: must be table or json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "change"),
    [("poisson", "num_requests=1000000"), ("rl_rollout", "num_prompts=62500"), ("agentic", "num_sessions=126000")],
)
def test_a_million_requests(name: str, change: str, record_property: Any) -> None:
    began = time.perf_counter()
    requests = load(name, [f"workload.{change}"]).requests()
    record_property("seconds", round(time.perf_counter() - began, 2))
    assert len(requests) >= 990_000
    assert requests.shared_len.sum() <= requests.input_len.sum()
    assert len(requests.tokens(len(requests) - 1, VOCAB)) == requests.input_len[-1]
