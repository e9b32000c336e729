"""Ranks that are killed or hang at any moment: all requests end as in a quiet run, or are told that it is over."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from splash.core.errors import WorkerError
from splash.core.request import SamplingParams
from splash.engine.config import EngineConfig
from splash.engine.engine import Engine
from splash.engine.executor import LocalGroup
from splash.engine.grammar import regex_grammar
from splash.engine.outputs import GenerationRequest
from splash.engine.restarts import Restarts

pytestmark = pytest.mark.timeout(240)

RANKS = 2
LONG = 40
PARAMS = {
    "greedy": SamplingParams(max_tokens=LONG, temperature=0.0, ignore_eos=True),
    "drawn": SamplingParams(max_tokens=LONG, temperature=1.1, top_p=0.95, seed=7, ignore_eos=True),
    "unseeded": SamplingParams(max_tokens=LONG, temperature=0.8, ignore_eos=True),
    "penalised": SamplingParams(
        max_tokens=LONG, temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=0.4
    ),
    "late": SamplingParams(max_tokens=LONG, min_tokens=LONG - 5, temperature=1.0, seed=3, logprobs=2),
    "biased": SamplingParams(max_tokens=LONG, temperature=0.9, seed=5, logit_bias=((30, 4.0),), ignore_eos=True),
    "grammar": SamplingParams(max_tokens=LONG, temperature=1.0, seed=9, grammar=regex_grammar("[a-f]{30,36}[0-9]")),
}


class Served:
    """An engine, the requests that it is asked, and what came of them."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokens: dict[str, list[int]] = {}
        self.texts: dict[str, str] = {}
        self.finished: dict[str, str] = {}

    @property
    def pids(self) -> list[int]:
        group = self.engine.loop.executor
        assert isinstance(group, LocalGroup)
        return group.pids

    def ask(self) -> None:
        self.tokens, self.texts, self.finished = {}, {}, {}
        # Seeds that nobody gives come from the request's number: all asks draw alike.
        self.engine._next_number = 0
        for name, params in PARAMS.items():
            prompt = self.engine.tokenizer.encode(f"{name}: the quick brown fox " * 9)
            self.engine.add_request(GenerationRequest(name, tuple(prompt), params))
            self.tokens[name], self.texts[name] = [], ""

    def step(self) -> None:
        for output in self.engine.step():
            assert output.id not in self.finished
            self.tokens[output.id] += output.tokens
            self.texts[output.id] += output.text
            assert output.num_output_tokens == len(self.tokens[output.id])
            if output.finish_reason is not None:
                self.finished[output.id] = output.finish_reason

    def until(self, done: Callable[[], bool]) -> None:
        for _ in range(600):
            if done():
                return
            self.step()
        raise AssertionError("it does not come to that")

    def finish(self) -> tuple[dict[str, list[int]], dict[str, str], dict[str, str]]:
        self.until(lambda: not self.engine.has_work)
        pool = self.engine.scheduler.pool
        assert pool.num_free == pool.num_total
        return self.tokens, self.texts, self.finished


def config(checkpoint: Path, **options: object) -> EngineConfig:
    # Prompts need several steps, and a switch has more to copy than one step may.
    return EngineConfig(
        str(checkpoint),
        hardware="cpu",
        ranks=RANKS,
        kv_cache_gib=0.05,
        page_size=8,
        max_batched_tokens=128,
        switch_copy_mib=0.02,
        **options,  # type: ignore[arg-type]
    )


@pytest.fixture(scope="module")
def served(tiny_checkpoint: Callable[[str], Path]) -> Iterator[Served]:
    engine = Engine(config(tiny_checkpoint("base"), max_restarts=100, step_timeout_s=60.0))
    try:
        yield Served(engine)
    finally:
        engine.close()


@pytest.fixture(scope="module")
def quiet(served: Served) -> tuple[dict[str, list[int]], dict[str, str], dict[str, str]]:
    served.ask()
    outcome = served.finish()
    assert outcome[2] == dict.fromkeys(PARAMS, "length") | {"grammar": "stop", "penalised": outcome[2]["penalised"]}
    assert served.engine.stats().restarts == 0
    return outcome


def to_prefill(served: Served) -> None:
    served.step()
    assert served.engine.scheduler.running and not any(served.tokens.values())


def to_decode(served: Served) -> None:
    served.until(lambda: all(len(tokens) > 10 for tokens in served.tokens.values()))


def to_copying(served: Served) -> None:
    to_decode(served)
    served.engine.switch("dp" if served.engine.layout != "dp" else "cp", "precopy")
    served.until(
        lambda: served.engine.switcher.active is not None and served.engine.switcher.active.status == "copying"
    )


def to_committing(served: Served) -> None:
    to_decode(served)
    served.engine.switch("dp" if served.engine.layout != "dp" else "cp", "layerwise")
    served.until(lambda: served.engine.switcher.committing)


def to_voting(served: Served) -> None:
    to_copying(served)
    served.until(lambda: served.engine.switcher.awaits_votes)


def to_prepared_commit(served: Served) -> None:
    to_voting(served)
    served.until(lambda: served.engine.switcher.committing and not served.engine.switcher.awaits_votes)


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("reach", [to_prefill, to_decode, to_copying, to_committing, to_voting, to_prepared_commit])
def test_a_killed_rank_changes_no_token(
    served: Served, quiet: object, reach: Callable[[Served], None], rank: int
) -> None:
    restarts, layout = served.engine.stats().restarts, served.engine.layout
    switches = len(served.engine.switcher.history)
    served.ask()
    reach(served)
    before = served.pids
    os.kill(before[rank], signal.SIGKILL)
    served.until(lambda: served.engine.stats().restarts > restarts)
    assert not set(before) & set(served.pids)
    if reach in (to_copying, to_committing):
        record = served.engine.switcher.history[-1]
        assert (len(served.engine.switcher.history), served.engine.switcher.active) == (switches + 1, None)
        assert record.status == "failed"
        assert f"rank {rank} was killed by signal 9" in record.reason
    if reach in (to_voting, to_prepared_commit):  # a rank may have voted before it died, or even have committed
        record = served.engine.switcher.history[switches]
        assert record.status == "committed" or (reach is to_voting and record.status == "failed"), record
        layout = record.target if record.status == "committed" else layout
    assert served.engine.layout == layout
    assert served.finish() == quiet
    assert served.engine.stats().restarts == restarts + 1


def test_an_idle_engine_starts_its_ranks_anew(served: Served, quiet: object) -> None:
    restarts = served.engine.stats().restarts
    os.kill(served.pids[1], signal.SIGKILL)
    os.waitid(os.P_PID, served.pids[1], os.WEXITED | os.WNOWAIT)
    served.engine.check()
    assert served.engine.stats().restarts == restarts + 1
    served.ask()
    assert served.finish() == quiet


def test_aborted_requests_stay_gone(served: Served, quiet: tuple[dict[str, list[int]], ...]) -> None:
    served.ask()
    to_decode(served)
    os.kill(served.pids[0], signal.SIGKILL)
    served.engine.abort("drawn")  # while a step is in flight
    served.finish()
    assert served.finished.pop("drawn") == "abort"
    assert {name: quiet[0][name] for name in served.finished} == {name: served.tokens[name] for name in served.finished}


def test_switches_work_after_a_restart(served: Served, quiet: object) -> None:
    served.ask()
    to_decode(served)
    os.kill(served.pids[1], signal.SIGKILL)
    served.step()
    to_decode(served)
    for layout in ("dop", "tp"):
        record = served.engine.switch(layout)
        served.until(lambda: served.engine.switcher.active is None)
        assert record.status == "committed", record
    assert served.finish() == quiet


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_rank_that_hangs_is_named_and_replaced(
    tiny_checkpoint: Callable[[str], Path], quiet: object, rank: int
) -> None:
    lines: list[str] = []
    engine = Engine(config(tiny_checkpoint("base"), step_timeout_s=6.0), lines.append)
    try:
        hanging = Served(engine)
        hanging.ask()
        to_decode(hanging)
        os.kill(hanging.pids[rank], signal.SIGSTOP)
        assert hanging.finish() == quiet
    finally:
        engine.close()
    assert engine.loop.restarts.num_restarts == 1
    assert f"rank {rank}" in engine.loop.restarts.last_error
    assert any(f"rank {rank}" in line and "starting the ranks anew (restart 1 of 3)" in line for line in lines), lines


def test_spent_restarts_end_the_engine(tiny_checkpoint: Callable[[str], Path]) -> None:
    engine = Engine(config(tiny_checkpoint("base"), max_restarts=1))
    try:
        dying = Served(engine)
        dying.ask()
        to_prefill(dying)
        os.kill(dying.pids[0], signal.SIGKILL)
        to_decode(dying)
        os.kill(dying.pids[1], signal.SIGKILL)
        with pytest.raises(WorkerError, match=r"rank 1 was killed by signal 9; restarts are spent \(1 in ") as caught:
            dying.finish()
        assert caught.value.rank == 1
        pids = dying.pids
    finally:
        engine.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_restarts_count_for_a_window_and_failed_ones_count_too() -> None:
    now = [0.0]
    restarts = Restarts(most=2, window_s=10.0, clock=lambda: now[0])
    tried: list[float] = []

    def restart() -> None:
        assert restarts.under_way
        tried.append(now[0])
        if len(tried) == 1:
            raise WorkerError("rank 3 died at its start", 3)

    restarts.run(WorkerError("rank 1 died", 1), restart)
    assert (restarts.num_restarts, restarts.last_error) == (2, "rank 3 died at its start")
    now[0] = 9.9
    with pytest.raises(WorkerError, match="rank 2 died; restarts are spent") as spent:
        restarts.run(WorkerError("rank 2 died", 2), restart)
    assert spent.value.rank == 2
    assert not restarts.under_way
    now[0] = 10.0
    restarts.run(WorkerError("rank 2 died", 2), restart)
    assert tried == [0.0, 0.0, 10.0]
