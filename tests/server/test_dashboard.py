"""The dashboard and the manual speak of metrics, and of labels, that the server really has."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from splash.core.decision import Decision
from splash.engine.metrics import RequestTimes
from splash.switch.orders import SwitchRecord

ROOT = Path(__file__).parents[2]
DASHBOARD = json.loads((ROOT / "deploy" / "grafana-dashboard.json").read_text())
NAME = re.compile(r"\b(?:splash:|process_)\w+")
BY_SCRAPE = {"job", "instance"}


def expressions(node: Any) -> Iterator[str]:
    """Every query of the dashboard."""
    if isinstance(node, dict):
        yield from (node[key] for key in ("expr", "definition") if isinstance(node.get(key), str))
        node = list(node.values())
    if isinstance(node, list):
        for part in node:
            yield from expressions(part)


@pytest.fixture
def exposed(served: Any) -> dict[str, set[str]]:
    """The labels of each sample that /metrics has, once everything has happened that is counted."""
    metrics = served.engine.metrics
    metrics.step("tp", 0.01, 3, 0.01)
    times = RequestTimes(1.0)
    metrics.start(times, 5, 2.0)
    for now in (3.0, 4.0):
        metrics.token(times, now)
    metrics.finish(times, "length", 5, 2, 4.0)
    record = SwitchRecord(id=1, source="tp", target="dp", asked="auto", method="precopy", status="committed")
    record.kv_bytes_received, record.weight_bytes_received = [3], [5]
    metrics.switched(record, 2.0)
    served.engine.decision = Decision(
        policy="cost", layout="tp", target="tp", reason="", predictions_ms={"tp": 2.0, "dp": None}
    )
    labels: dict[str, set[str]] = defaultdict(set)
    for family in text_string_to_metric_families(served.http.get("/metrics").text):
        for sample in family.samples:
            labels[sample.name] |= set(sample.labels)
    return labels


def test_every_query_asks_for_what_is_there(exposed: dict[str, set[str]]) -> None:
    queries = list(expressions(DASHBOARD))
    assert len(queries) >= 20
    for query in queries:
        names = NAME.findall(query)
        assert names, query
        asked = set(re.findall(r"[{,]\s*(\w+)\s*=", query))
        for group in re.findall(r"by \(([^)]*)\)", query):
            asked |= {label.strip() for label in group.split(",")}
        asked |= set(re.findall(r"label_values\([^,]*,\s*(\w+)\)", query))
        for name in names:
            assert name in exposed, f"no such metric: {query}"
            assert asked - BY_SCRAPE <= exposed[name], f"no such label: {query}"


def test_every_legend_names_a_label_of_its_query(exposed: dict[str, set[str]]) -> None:
    targets = [target for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]
    for target in targets:
        query, legend = target["expr"], target.get("legendFormat", "")
        known = exposed[NAME.findall(query)[0]] | BY_SCRAPE
        if "sum" in query:
            known = {label.strip() for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(",")}
        assert set(re.findall(r"{{(\w+)}}", legend)) <= known, target
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_every_metric_is_in_the_manual_and_the_other_way_round(exposed: dict[str, set[str]]) -> None:
    suffix = re.compile(r"_(bucket|count|sum|created)$")
    ours = {suffix.sub("", name.removeprefix("splash:")) for name in exposed if name.startswith("splash:")}
    manual = (ROOT / "docs" / "operations.md").read_text().partition("## Metrics")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in manual.splitlines() if line.startswith("| `")]
    named = {re.sub(r"{.*}", "", name) for row in rows for name in re.findall(r"`([^`]*)`", row)}
    assert named == ours


def test_labels_of_the_manual_are_those_that_metrics_have(exposed: dict[str, set[str]]) -> None:
    manual = (ROOT / "docs" / "operations.md").read_text()
    written = re.findall(r"`(\w+){([\w,]+)}`", manual)
    assert len(written) >= 8
    for name, labels in written:
        found = next(of for sample, of in exposed.items() if sample in (f"splash:{name}", f"splash:{name}_bucket"))
        assert found - {"le"} == {"model_name", *labels.split(",")}, name
