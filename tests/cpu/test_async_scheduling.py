"""Steps that are planned and sent while the one before runs: nobody can tell from what is generated."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from splash.core.layout import LAYOUTS
from splash.core.request import SamplingParams, TokenLogprob
from splash.engine.executor import LocalGroup
from splash.engine.grammar import regex_grammar
from splash.engine.messages import Run
from splash.engine.outputs import GenerationRequest
from splash.llm import LLM

pytestmark = pytest.mark.timeout(240)

LONG = 24
PROMPTS = [f"{number}: The quick brown fox jumps over the lazy dog. " * (2 + number % 3) for number in range(10)]
METHODS = ("precopy", "layerwise", "blocking", "auto")
# Too little for ten requests at once, so that some are preempted.
KV_GIB = {1: 0.0091, 2: 0.0088, 4: 0.0082}


def engine(ranks: int, **options: Any) -> LLM:
    return LLM(
        ranks=ranks,
        hardware="cpu",
        page_size=4,
        max_batched_tokens=64,
        max_num_seqs=8,
        switch_copy_mib=2.0,
        **{"kv_cache_gib": KV_GIB[ranks], **options},
    )


@dataclass
class Output:
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    end: tuple[str | None, str | int | None] = (None, None)


class Client:
    """Asks an engine, and counts the steps that were sent while another was in flight."""

    def __init__(self, llm: LLM) -> None:
        self.engine = llm.engine
        self.outputs: dict[str, Output] = {}
        self.num_ahead = 0
        group = llm.engine.loop.executor
        assert isinstance(group, LocalGroup)
        self.pids = group.pids
        submit = group.submit

        def counting(run: Run) -> None:
            self.num_ahead += len(self.engine.loop._in_flight)
            submit(run)

        group.submit = counting  # type: ignore[method-assign]

    def ask(self, wanted: dict[str, tuple[str, SamplingParams]]) -> None:
        self.outputs = {}
        # Seeds that nobody gives come from the request's number: all asks draw alike.
        self.engine._next_number = max(self.engine._next_number, 0) // 1000 * 1000 + 1000
        for name, (prompt, params) in wanted.items():
            tokens = tuple(self.engine.tokenizer.encode(prompt))
            self.engine.add_request(GenerationRequest(name, tokens, params))
            self.outputs[name] = Output()

    def step(self) -> None:
        for output in self.engine.step():
            known = self.outputs[output.id]
            assert known.end == (None, None)
            known.tokens += output.tokens
            known.text += output.text
            known.logprobs += output.logprobs
            assert output.num_output_tokens == len(known.tokens)
            known.end = output.finish_reason, output.stop_reason

    def until(self, done: Callable[[], bool]) -> None:
        for _ in range(1000):
            if done():
                return
            self.step()
        raise AssertionError("it does not come to that")

    def finish(self) -> dict[str, Output]:
        self.until(lambda: not self.engine.has_work)
        pool = self.engine.scheduler.pool
        assert pool.num_free == pool.num_total
        return self.outputs


@pytest.fixture(scope="module")
def plain() -> Iterator[Client]:
    """One step at a time, with memory to spare."""
    with engine(2, kv_cache_gib=0.1, async_scheduling=False) as llm:
        yield Client(llm)


@pytest.fixture(scope="module")
def wanted(plain: Client) -> dict[str, tuple[str, SamplingParams]]:
    """Requests of all kinds. Some stop at a token or a text that comes on the way."""
    greedy = {"max_tokens": LONG, "temperature": 0.0, "ignore_eos": True}
    plain.ask({"greedy": (PROMPTS[0], SamplingParams(**greedy))})
    greedy_output = plain.finish()["greedy"]
    kinds = {
        "greedy": SamplingParams(**greedy),
        "stop token": SamplingParams(**{**greedy, "stop_token_ids": (greedy_output.tokens[9],)}),
        "stop text": SamplingParams(**greedy, stop=(greedy_output.text[30:34],)),
        "short": SamplingParams(max_tokens=1, temperature=0.0),
        "two": SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True),
        "drawn": SamplingParams(max_tokens=LONG, temperature=1.1, top_p=0.95, seed=7, ignore_eos=True),
        "limited": SamplingParams(max_tokens=LONG, temperature=0.8, top_k=40, min_p=0.01, seed=11, logprobs=0),
        "penalised": SamplingParams(**greedy, repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=0.4),
        "late": SamplingParams(max_tokens=LONG, min_tokens=LONG - 5, temperature=1.0, seed=3, logprobs=2),
        "scored": SamplingParams(**greedy, prompt_logprobs=1, logit_bias=((30, 1.0),)),
    }
    same = ("greedy", "stop token", "stop text")
    return {
        name: (PROMPTS[0] if name in same else PROMPTS[number], params)
        for number, (name, params) in enumerate(kinds.items())
    }


@pytest.fixture(scope="module")
def expected(plain: Client, wanted: dict[str, tuple[str, SamplingParams]]) -> dict[str, Output]:
    plain.ask(wanted)
    outputs = plain.finish()
    assert plain.num_ahead == 0 and plain.engine.stats().preemptions == 0
    assert outputs["stop token"].end[0] == outputs["stop text"].end[0] == "stop"
    assert 1 < len(outputs["stop token"].tokens) < LONG and 1 < len(outputs["stop text"].tokens) < LONG
    return outputs


def check(got: dict[str, Output], expected: dict[str, Output], where: str) -> None:
    for name, want in expected.items():
        output = got[name]
        assert (output.tokens, output.text, output.end) == (want.tokens, want.text, want.end), f"{where}: {name}"
        for one, other in zip(output.logprobs, want.logprobs, strict=True):
            assert one.token == other.token and one.logprob == pytest.approx(other.logprob, abs=1e-3)
            assert [token for token, _ in one.top] == [token for token, _ in other.top]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_layout_and_way_to_switch(
    wanted: dict[str, tuple[str, SamplingParams]], expected: dict[str, Output], ranks: int
) -> None:
    """With preemptions, what the prefix cache has, and aborts."""
    with engine(ranks, async_scheduling=True) as llm:
        client = Client(llm)
        for number, layout in enumerate(["tp", *(name for name in LAYOUTS if name != "tp")]):
            client.ask(wanted)
            client.until(lambda: len(client.outputs["greedy"].tokens) > 3)
            client.engine.abort("late")
            if layout != "tp":
                record = client.engine.switch(layout, METHODS[number % len(METHODS)])
                client.until(lambda: client.engine.switcher.active is None)
                assert record.status == "committed", record
            got = client.finish()
            assert got["late"].end == ("abort", None)
            assert got["late"].tokens == expected["late"].tokens[: len(got["late"].tokens)]
            check(got, {name: want for name, want in expected.items() if name != "late"}, f"T{ranks}, {layout}")
        client.ask(wanted)
        before = client.engine.loop.num_steps, client.num_ahead
        check(client.finish(), expected, f"T{ranks}")
        assert client.num_ahead - before[1] >= client.engine.loop.num_steps - before[0] - 3, "nearly all are sent ahead"
        assert client.engine.stats().preemptions > 0
        assert client.engine.stats().prefix_hit_tokens > 0


@pytest.mark.parametrize("rank", range(2))
def test_a_rank_that_dies_with_two_steps_in_flight_changes_no_token(
    wanted: dict[str, tuple[str, SamplingParams]], expected: dict[str, Output], rank: int
) -> None:
    with engine(2, async_scheduling=True, layout="dop") as llm:
        client = Client(llm)
        client.ask(wanted)
        client.until(lambda: len(client.outputs["drawn"].tokens) > 5)
        loop = client.engine.loop
        (record,) = loop._in_flight  # the next step is sent behind it, to ranks one of which is dead
        os.kill(client.pids[rank], signal.SIGKILL)
        os.waitid(os.P_PID, client.pids[rank], os.WEXITED | os.WNOWAIT)
        client.step()
        assert record not in loop._in_flight and client.engine.stats().restarts == 1
        check(client.finish(), expected, f"rank {rank}")


def test_where_a_grammar_runs_each_step_is_over_before_the_next(
    wanted: dict[str, tuple[str, SamplingParams]], expected: dict[str, Output]
) -> None:
    params = SamplingParams(max_tokens=LONG, temperature=1.0, seed=9, grammar=regex_grammar("[a-f]{9}[0-9]"))
    with engine(2, async_scheduling=True, kv_cache_gib=0.1) as llm:
        client = Client(llm)
        client.ask({**wanted, "grammar": ("A number:", params)})
        client.until(lambda: client.outputs["grammar"].tokens != [])
        before = client.num_ahead
        client.until(lambda: client.outputs["grammar"].end[0] is not None)
        assert client.num_ahead == before
        got = client.finish()
        assert client.num_ahead > before
        assert len(got["grammar"].text) == 10 and got["grammar"].end[0] == "stop"
        check(got, expected, "beside a grammar")
