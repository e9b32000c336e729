"""The layout's routes: what serves, switching it, giving a switch up, and the record of switches."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from splash.core.decision import Decision


def switch(served: Any, layout: str, **options: Any) -> httpx.Response:
    response: httpx.Response = served.http.post("/layout", json={"layout": layout, **options})
    return response


def lasting(served: Any, pool: ThreadPoolExecutor, layout: str, status: str = "copying") -> Future[httpx.Response]:
    """Ask for a switch that lasts, and return once it is under way."""
    served.engine.switch_ends[layout] = (status, "")
    asking = pool.submit(switch, served, layout)
    while (active := served.http.get("/layout").json()["active"]) is None or active["to"] != layout:
        assert not asking.done(), asking.result().text
    return asking


def ids(served: Any, **query: Any) -> list[int]:
    return [record["id"] for record in served.http.get("/layout/history", params=query).json()["switches"]]


def test_the_layout_that_serves(served: Any) -> None:
    # 4 ranks do not divide 6 heads, so only the layouts with replicated projections could run.
    assert served.http.get("/layout").json() == {
        "layout": "tp",
        "policy": "static",
        "pinned": False,
        "decision": None,
        "ranks": 4,
        "hardware": "cpu",
        "layouts": ["dp", "cp"],
        "methods": ["auto", "precopy", "layerwise", "blocking"],
        "active": None,
    }


def test_a_switch_of_the_policy_is_explained(served: Any) -> None:
    served.engine.policy = "cost"
    served.engine.policy_switches(
        Decision(
            policy="cost",
            layout="tp",
            target="dp",
            switches=True,
            method="layerwise",
            predictions_ms={"tp": None, "dp": 11.0, "cp": 12.0, "dop": None, "dcp": None},
            infeasible={"dop": "4 ranks do not divide 6 heads"},
            lead=0.2,
            margin=0.05,
            gain_s=3.0,
            cost_s=0.1,
            horizon_s=20.0,
            reason="tp is predicted to take 20.0% longer than dp",
        )
    )
    switch(served, "cp")
    by_policy, by_hand = served.http.get("/layout/history").json()["switches"]
    made = by_policy["decision"]
    assert made["predictions_ms"] == {"tp": None, "dp": 11.0, "cp": 12.0, "dop": None, "dcp": None}
    assert made["infeasible"] == {"dop": "4 ranks do not divide 6 heads"}
    assert (made["lead"], made["margin"], made["gain_s"], made["cost_s"], made["horizon_s"]) == (0.2, 0.05, 3, 0.1, 20)
    assert made["reason"] == "tp is predicted to take 20.0% longer than dp" and by_hand["decision"] is None
    assert served.http.get("/layout").json()["decision"] == made


def test_a_switch_by_hand_pins_the_layout_until_auto(served: Any) -> None:
    served.engine.policy = "cost"
    assert served.http.get("/layout").json()["pinned"] is False
    switch(served, "dp")
    assert served.http.get("/layout").json()["pinned"] is True
    released = switch(served, "auto")
    assert released.status_code == 200 and released.json() == served.http.get("/layout").json()
    assert (released.json()["pinned"], released.json()["policy"], released.json()["layout"]) == (False, "cost", "dp")
    assert ids(served) == [1]
    for more in ({"rebalance": True}, {"method": "blocking"}):
        refused = switch(served, "auto", **more)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "layout")


def test_a_committed_switch_answers_its_record(served: Any) -> None:
    response = switch(served, "dp")
    assert response.status_code == 200
    record = response.json()
    assert (record["id"], record["from"], record["to"], record["asked"]) == (1, "tp", "dp", "auto")
    assert (record["status"], record["reason"], record["method"]) == ("committed", "", "layerwise")
    assert {"kv_bytes_received", "weight_bytes_received", "pages_moved", "planning_ms", "added_ms"} <= set(record)
    assert served.http.get("/layout").json()["layout"] == "dp"
    assert served.http.get("/layout/history").json() == {"switches": [record]}


def test_options_reach_the_engine(served: Any) -> None:
    assert switch(served, "dp", method="blocking", rebalance=True).json()["asked"] == "blocking"
    assert switch(served, "cp", method="precopy", rebalance=False).json()["asked"] == "precopy"
    assert switch(served, "cp", method=None, rebalance=None).json()["asked"] == "auto"
    assert served.engine.rebalanced == [1]


@pytest.mark.parametrize(
    ("status", "reason", "type"),
    [
        ("refused", "layout cp has room for 8 pages on rank 0, and 9 are needed", "invalid_request_error"),
        ("failed", "rank 1: the manifest differs", "server_error"),
        ("aborted", "", "invalid_request_error"),
        ("superseded", "by switch 2, to dp", "invalid_request_error"),
    ],
)
def test_a_switch_that_ends_otherwise_conflicts(served: Any, status: str, reason: str, type: str) -> None:
    served.engine.switch_ends["cp"] = (status, reason)
    response = switch(served, "cp")
    assert response.status_code == 409
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code", "switch"}
    assert (error["type"], error["param"], error["code"]) == (type, None, f"switch_{status}")
    assert status in error["message"]
    assert error["message"].endswith(reason)
    assert (error["switch"]["from"], error["switch"]["to"], error["switch"]["status"]) == ("tp", "cp", status)
    assert served.http.get("/layout").json()["layout"] == "tp"
    assert served.http.get("/layout/history").json()["switches"] == [error["switch"]]


def test_the_official_client_sees_the_record(served: Any) -> None:
    served.engine.switch_ends["cp"] = ("refused", "no room")
    root = served.client.with_options(base_url=served.url)
    with pytest.raises(openai.ConflictError, match="no room") as refused:
        root.post("/layout", body={"layout": "cp"}, cast_to=object)
    assert refused.value.body["switch"]["to"] == "cp"  # type: ignore[index]


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "layout", "missing_required_parameter"),
        ({"layout": None}, "layout", "missing_required_parameter"),
        ({"layout": 3}, "layout", "invalid_value"),
        ({"layout": ["dp"]}, "layout", "invalid_value"),
        ({"layout": "zig"}, "layout", "invalid_value"),
        ({"layout": ""}, "layout", "invalid_value"),
        ({"layout": "tp"}, "layout", "invalid_value"),  # it shards 6 heads over 4 ranks
        ({"layout": "dp", "method": "magic"}, "method", "invalid_value"),
        ({"layout": "dp", "method": 1}, "method", "invalid_value"),
        ({"layout": "dp", "rebalance": 1}, "rebalance", "invalid_value"),
        ({"layout": "dp", "rebalance": "yes"}, "rebalance", "invalid_value"),
        ({"layout": "dp", "methd": "auto"}, "methd", "unknown_parameter"),
    ],
)
def test_bad_switches_are_refused_by_name(served: Any, body: dict[str, Any], param: str, code: str) -> None:
    response = served.http.post("/layout", json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")
    assert param in error["message"]
    assert ids(served) == []


def test_what_may_be_chosen_is_named(served: Any) -> None:
    assert "tp, dp, cp, dop, dcp" in switch(served, "zig").json()["error"]["message"]
    assert "auto, precopy, layerwise, blocking" in switch(served, "dp", method="x").json()["error"]["message"]
    assert "use dp, cp" in switch(served, "tp").json()["error"]["message"]


def test_history_is_oldest_first_and_limited_to_the_newest(served: Any) -> None:
    assert ids(served) == []
    for layout in ("dp", "cp", "dp"):
        switch(served, layout)
    assert ids(served) == ids(served, limit=3) == ids(served, limit=9) == [1, 2, 3]
    assert ids(served, limit=2) == [2, 3]
    for limit in ("0", "-1", "two", "1.5"):
        response = served.http.get("/layout/history", params={"limit": limit})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "limit"


def test_a_switch_under_way_is_seen_and_can_be_aborted(served: Any) -> None:
    with ThreadPoolExecutor(1) as pool:
        asking = lasting(served, pool, "cp")
        active = served.http.get("/layout").json()["active"]
        assert (active["id"], active["from"], active["to"], active["status"]) == (1, "tp", "cp", "copying")
        assert ids(served) == []
        aborted = served.http.delete("/layout/switch")
        answer = asking.result(20)
    assert (aborted.status_code, aborted.json()["id"], aborted.json()["status"]) == (200, 1, "aborted")
    assert (answer.status_code, answer.json()["error"]["switch"]) == (409, aborted.json())
    assert served.http.get("/layout").json()["active"] is None
    missing = served.http.delete("/layout/switch")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "no_switch")


def test_a_switch_that_commits_cannot_be_aborted(served: Any) -> None:
    with ThreadPoolExecutor(1) as pool:
        asking = lasting(served, pool, "cp", "committing")
        response = served.http.delete("/layout/switch")
        assert (response.status_code, response.json()["error"]["code"]) == (409, "switch_committing")
        assert response.json()["error"]["switch"]["status"] == "committing"
        assert switch(served, "dp").status_code == 200  # which ends the other one here
        assert asking.result(20).status_code == 409


def test_the_last_of_several_wins(served: Any) -> None:
    with ThreadPoolExecutor(1) as pool:
        asking = lasting(served, pool, "cp")
        assert switch(served, "dp").status_code == 200
        error = asking.result(20).json()["error"]
    assert (error["code"], error["switch"]["id"]) == ("switch_superseded", 1)
    assert "by switch 2, to dp" in error["message"]
    assert ids(served) == [1, 2]


def test_a_client_that_leaves_does_not_end_its_switch(served: Any) -> None:
    served.engine.switch_ends["cp"] = ("copying", "")
    with httpx.Client(base_url=served.url, timeout=0.5) as impatient, pytest.raises(httpx.ReadTimeout):
        impatient.post("/layout", json={"layout": "cp"})
    assert served.http.get("/layout").json()["active"]["to"] == "cp"
    assert served.http.delete("/layout/switch").json()["status"] == "aborted"


def test_requests_are_served_during_a_switch(served: Any) -> None:
    with ThreadPoolExecutor(1) as pool:
        asking = lasting(served, pool, "cp")
        assert served.client.completions.create(model="scripted", prompt="hello", max_tokens=3).usage.total_tokens > 3
        assert not asking.done()
        served.http.delete("/layout/switch")


def test_the_engine_dies_under_a_switch(served: Any) -> None:
    served.engine.switch_ends["cp"] = ("dead", "")
    response = switch(served, "cp")
    assert (response.status_code, response.json()["error"]["code"]) == (500, "engine_error")
    assert "rank 1 died" in response.json()["error"]["message"]
    assert switch(served, "dp").status_code == 503


def test_with_the_key_layouts_can_be_switched(serve: Callable[..., Any]) -> None:
    served = serve(api_key="s3cret")
    headers = {"authorization": "Bearer s3cret"}
    assert served.http.post("/layout", json={"layout": "dp"}, headers=headers).status_code == 200
    assert served.http.get("/layout/history", headers=headers).status_code == 200
    assert served.http.delete("/layout/switch", headers=headers).status_code == 404


def test_stopping_answers_a_switch_that_lasts(serve: Callable[..., Any]) -> None:
    served = serve(grace_s=1)
    with ThreadPoolExecutor(1) as pool:
        asking = lasting(served, pool, "cp")
        served.stop()
        answer = asking.result(20)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")


def test_other_methods_are_named(served: Any) -> None:
    response = served.http.put("/layout", json={"layout": "dp"})
    assert (response.status_code, response.headers["allow"]) == (405, "GET, POST")
