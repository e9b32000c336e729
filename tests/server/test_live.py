"""The live page and its feed: what is served, that nothing on it comes from elsewhere, and who sees what."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from typing import Any

import jsonschema_rs
import msgspec

from splash.core.layout import LAYOUTS
from splash.engine.history import Sample, StepTime, SwitchEvent
from splash.engine.picture import Picture
from splash.server.auth import ApiKey
from splash.switch.orders import SwitchRecord

FILES = {file.name: file.read_text() for file in resources.files("splash.server").joinpath("page").iterdir()}
FIELDS = "now_s model version may_switch control placements load picture step_times samples events".split()


def sample(time_s: float) -> Sample:
    return Sample(
        time_s=time_s,
        seconds=0.5,
        layout="tp",
        steps=3,
        step_ms=100.0,
        step_max_ms=200.0,
        output_tokens=6,
        prompt_tokens=0,
        ttft_ms=None,
        ttft_max_ms=None,
        itl_ms=100.0,
        itl_max_ms=101.0,
        running=2,
        waiting=0,
        used_pages=(1, 2, 3, 4),
    )


def schema(type: Any) -> dict[str, Any]:
    """JSON Schema of a type, every field needed and no other."""
    document = msgspec.json.schema(type)
    for part in document["$defs"].values():
        part["additionalProperties"] = False
        part["required"] = list(part["properties"])
    return document


def test_the_page_and_all_it_names_are_served_under_a_strict_policy(served: Any) -> None:
    page = served.http.get("/")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    seen, todo = set(), {"/"}
    while todo:
        path = todo.pop()
        seen.add(path)
        response = served.http.get(path)
        assert response.status_code == 200, path
        policy = dict(part.split(maxsplit=1) for part in response.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
        assert all(value in ("'none'", "'self'") for value in policy.values())
        assert response.headers["x-content-type-options"] == "nosniff"
        if path == "/":
            named = re.findall(r'(?:href|src)="(?!#)([^"]+)"', response.text)
            found = {f"/{name}" for name in named}
        else:
            found = {f"/page/{name}" for name in re.findall(r'from "\./([^"]+)"', response.text)}
        todo |= found - seen
    assert seen == {"/"} | {f"/page/{name}" for name in FILES if name != "index.html"}


def test_nothing_on_the_page_comes_from_elsewhere_or_is_inline() -> None:
    for name, text in FILES.items():
        without_names = text.replace("http://www.w3.org/2000/svg", "")  # a namespace, which nobody fetches
        assert not re.search(r"https?://|//\w+\.\w+/|@import|url\(", without_names), name
    assert not re.search(r"<script(?![^>]*src=)|<style|\son\w+=|\sstyle=", FILES["index.html"])
    assert not any(re.search(r"innerHTML|insertAdjacentHTML|document\.write|eval\(", text) for text in FILES.values())


def test_what_is_unchanged_is_not_sent_again(served: Any) -> None:
    first = served.http.get("/page/main.js")
    again = served.http.get("/page/main.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert served.http.get("/page/..%2Fapp.py").status_code == 404


def test_the_feed_has_the_schema_of_what_the_engine_keeps(served: Any) -> None:
    served.engine.samples = [sample(8.0), sample(9.0)]
    record = {"id": 1, "method": "precopy", "status": "committed", "reason": "", "by_policy": True}
    served.engine.events = [
        SwitchEvent(time_s=8.5, source="tp", target="dp", bytes_received=3, added_ms=1.0, **record)  # type: ignore[arg-type]
    ]
    live = served.http.get("/live").json()
    assert list(live) == FIELDS
    jsonschema_rs.validate(schema(Picture), live["picture"])
    jsonschema_rs.validate(schema(list[Sample]), live["samples"])
    jsonschema_rs.validate(schema(list[SwitchEvent]), live["events"])
    jsonschema_rs.validate(schema(dict[str, StepTime]), live["step_times"])
    assert len(live["samples"]) == 2 and live["events"][0]["from"] == "tp"
    assert live["control"] == served.http.get("/layout").json()
    assert {name: (part["projections"], part["kv"]) for name, part in live["placements"].items()} == {
        name: (layout.projections.value, layout.kv.value) for name, layout in LAYOUTS.items()
    }
    assert live["may_switch"] is True
    assert "cmpl-secret" not in json.dumps(live)


def test_only_what_is_new_is_sent(served: Any) -> None:
    served.engine.samples = [sample(7.0), sample(8.0), sample(9.0)]
    assert [part["time_s"] for part in served.http.get("/live", params={"since": 7.0}).json()["samples"]] == [8.0, 9.0]
    assert served.http.get("/live", params={"since": 9.0}).json()["samples"] == []
    for wrong in ("soon", "nan"):
        refused = served.http.get("/live", params={"since": wrong})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "since"


def test_a_crowd_asks_the_engine_once(served: Any) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: served.http.get("/live").json()["now_s"], range(16)))
    assert answers == [10.0] * 16
    assert served.engine.looks < 16


def test_the_page_is_open_and_the_feed_needs_a_key(serve: Callable[..., Any]) -> None:
    served = serve(api_keys=(ApiKey("user"), ApiKey("boss", admin=True)))
    assert served.http.get("/").status_code == served.http.get("/page/main.js").status_code == 200
    assert served.http.get("/page/nothing.js").status_code == 404
    assert served.http.get("/live").status_code == 401
    for key, may in (("user", False), ("boss", True)):
        live = served.http.get("/live", headers={"authorization": f"Bearer {key}"})
        assert live.status_code == 200 and live.json()["may_switch"] is may


def test_a_switch_under_way_is_shown(served: Any) -> None:
    served.engine.active_switch = SwitchRecord(id=3, source="tp", target="dp", asked="auto", status="copying")
    assert served.http.get("/live").json()["control"]["active"]["status"] == "copying"


def test_an_engine_that_loads_or_died_has_nothing_to_show(serve: Callable[..., Any]) -> None:
    served = serve(loaded=lambda: False)
    assert served.http.get("/live").status_code == 503
    assert served.http.get("/").status_code == 200
