"""Pace: rounds, the time that they take, and the prompts that come meanwhile agree with each other."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from splash.scheduler.pace import Carried, Coming, Pace, carried_together

COMING = st.builds(
    Coming,
    queue=st.floats(0, 1000),
    rate=st.floats(0, 50),
    lasting_s=st.floats(0, 100),
    places=st.floats(0, 500),
    ending=st.floats(0.01, 5),
)
CARRIED = st.builds(Carried, prompts=st.floats(1, 40), rounds=st.floats(0.5, 20), more_s=st.floats(0, 5))
PACES = st.builds(
    Pace,
    coming=COMING,
    carried=CARRIED,
    decode_s=st.floats(0.005, 0.1),
    backlog_rounds=st.floats(1, 50),
    backlog_s=st.floats(5, 20),
)


def begun(pace: Pace, rounds: float, seconds: float) -> float:
    """q(N, T), as the module defines it, with its bound."""
    coming, carried = pace.coming, pace.carried
    there = coming.queue + coming.rate * min(seconds, coming.lasting_s)
    room = (rounds - pace.backlog_rounds) * carried.prompts / carried.rounds
    return min(there, coming.places + coming.ending * rounds, room)


@given(pace=PACES, rounds=st.floats(51, 3000))
def test_rounds_take_what_they_take_by_themselves_and_what_prompts_add_that_begin_meanwhile(
    pace: Pace, rounds: float
) -> None:
    seconds = pace.seconds(rounds)
    alone = pace.backlog_s + (rounds - pace.backlog_rounds) * pace.decode_s
    each_s = pace.carried.more_s / pace.carried.prompts
    assert seconds == pytest.approx(alone + each_s * begun(pace, rounds, seconds), rel=1e-6)


@given(pace=PACES, seconds=st.floats(20, 600))
def test_the_rounds_of_a_time_take_that_time(pace: Pace, seconds: float) -> None:
    assert pace.seconds(pace.rounds(seconds)) == pytest.approx(seconds, rel=1e-6)


@given(pace=PACES, rounds=st.floats(0, 50))
def test_a_backlog_goes_by_evenly(pace: Pace, rounds: float) -> None:
    assume(rounds <= pace.backlog_rounds)
    assert pace.seconds(rounds) == pytest.approx(pace.backlog_s * rounds / pace.backlog_rounds)


@given(
    coming=COMING,
    decode_s=st.floats(0.005, 0.1),
    prompt_s=st.floats(0.001, 1),
    rounds=st.floats(0.1, 3),
    most=st.integers(1, 40),
)
def test_as_many_are_computed_together_as_begin_meanwhile(
    coming: Coming, decode_s: float, prompt_s: float, rounds: float, most: int
) -> None:
    """n prompts take n times what one takes, in as many rounds: what begins meanwhile is n, where rows allow it."""
    asked = []

    def carry(n: int) -> Carried:
        asked.append(n)
        return Carried(n, rounds, prompt_s * n)

    found = carried_together(coming, carry, decode_s, 30.0, most)
    assert len(asked) <= 2 and max(asked) <= most and 1 <= found.prompts <= most
    assert found.more_s == pytest.approx(prompt_s * found.prompts)
    if found.prompts == 1:
        assert most == 1 or coming.demand(found, decode_s, 30.0) <= 1
    elif found.prompts < most and coming.queue == 0:
        assert coming.demand(found, decode_s, 30.0) == pytest.approx(found.prompts, rel=0.3)


def test_two_prompts_together_by_hand() -> None:
    """10 a second, 0.1 s alone and 0.05 s for each: 2 come in the 0.2 s that 2 take, in one round."""
    coming = Coming(queue=0.0, rate=10.0, lasting_s=60.0, places=1000.0, ending=1.0)
    carry = lambda n: Carried(n, 1.0, 0.05 * n)  # noqa: E731
    found = carried_together(coming, carry, 0.1, 30.0, 16)
    assert found == pytest.approx((2.0, 1.0, 0.1))
    pace = Pace(coming, found, 0.1)
    assert pace.rounds(30.0) == pytest.approx(150)
    assert pace.seconds(150) == pytest.approx(30.0)
    assert pace._replace(coming=coming._replace(rate=2.0), carried=carry(1)).rounds(30.0) == pytest.approx(270)
    rare = coming._replace(rate=2.0)  # 0.05 s for each of 60 in 30 s leave 27 s
    assert carried_together(rare, carry, 0.1, 30.0, 16) == carry(1)
