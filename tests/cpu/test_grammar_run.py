"""Grammars through real ranks: output that matches, across switches of layout, beside others and beside failures."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import jsonschema_rs
import pytest

from splash.core.request import SamplingParams
from splash.engine.grammar import json_schema_grammar, regex_grammar
from splash.engine.outputs import GenerationRequest
from splash.llm import LLM

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"enum": ["small", "large"]},
        "pages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 4},
    },
    "required": ["name", "size", "pages"],
    "additionalProperties": False,
}
FREE = SamplingParams(max_tokens=40, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_checkpoint: Callable[[str], Path]) -> Iterator[LLM]:
    with LLM(str(tiny_checkpoint("base")), ranks=2, layout="dop", kv_cache_gib=0.1, page_size=16) as engine:
        yield engine


def json_params(seed: int) -> SamplingParams:
    return SamplingParams(max_tokens=400, seed=seed, temperature=1.5, grammar=json_schema_grammar(SCHEMA))


def run(llm: LLM, requests: list[GenerationRequest], layouts: list[str]) -> dict[str, tuple[str, str]]:
    """(text, finish reason) of each request, while the layout changes every few steps."""
    engine = llm.engine
    for request in requests:
        engine.add_request(request)
    texts = {request.id: "" for request in requests}
    ends: dict[str, str] = {}
    steps = 0
    while engine.has_work:
        for output in engine.step():
            texts[output.id] += output.text
            if output.finish_reason is not None:
                ends[output.id] = output.finish_reason
        steps += 1
        if layouts and steps % 7 == 0:
            engine.switch(layouts.pop())
    return {id: (text, ends[id]) for id, text in texts.items()}


def test_output_matches_while_the_layout_changes(llm: LLM) -> None:
    prompt = tuple(llm.engine.tokenizer.encode("How many ranks hold this page?"))

    def requests(turn: str) -> list[GenerationRequest]:
        batch = [GenerationRequest(f"{turn}{seed}", prompt, json_params(seed)) for seed in range(4)]
        return [*batch, GenerationRequest(f"{turn}free", prompt, FREE)]

    quiet = run(llm, requests("quiet"), [])
    busy = run(llm, requests("busy"), ["dop", "cp", "dp", "tp"])
    assert [busy[f"busy{name}"] for name in (*range(4), "free")] == list(quiet.values())
    for seed in range(4):
        text, end = quiet[f"quiet{seed}"]
        assert end == "stop"
        jsonschema_rs.validate(SCHEMA, json.loads(text))
    assert quiet["quietfree"][1] == "length"


def test_a_failing_grammar_harms_nobody(llm: LLM) -> None:
    alone = llm.generate("The quick", FREE)[0]
    costly = SamplingParams(max_tokens=400, seed=1, grammar=regex_grammar("(.{1,1000}){1,1000}"))
    broken = SamplingParams(max_tokens=9, grammar="start: nowhere")
    outputs = llm.generate(["The quick"] * 4, [costly, FREE, broken, json_params(1)])
    assert [output.finish_reason for output in outputs] == ["error", "length", "error", "stop"]
    assert "unknown name" in str(outputs[2].stop_reason)
    assert outputs[1].tokens == alone.tokens
    jsonschema_rs.validate(SCHEMA, json.loads(outputs[3].text))
    assert llm.engine.stats().free_pages == llm.engine.stats().total_pages
