"""Grammars: what they let through is judged by JSON Schema and regex libraries; a bad one harms nobody."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema_rs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from splash.core.errors import RequestError
from splash.core.request import SamplingParams
from splash.core.step import NewRequest
from splash.engine import grammar
from splash.engine.grammar import Constraint, Grammars, choice_grammar, json_schema_grammar, regex_grammar
from splash.engine.sampler import Sampler, allowed_tokens
from splash.platform.cpu.kernels import CpuKernels

WORDS = ["null", "true", "false", '":', '", "', '{"', '"}', "]", "[1", " ", "ab", "é", "👍"]
TOKENS = [*(bytes([byte]) for byte in range(256)), *(word.encode() for word in WORDS)]
EOS, END = len(TOKENS), len(TOKENS) + 1
VOCABULARY = END + 1 + 30  # padded, as models pad theirs


class Bytes:
    """Tokens are bytes and some words, then two that end a text."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def token_bytes(self, token: int) -> bytes:
        return (TOKENS + [b"<eos>", b"<end>"] + [b""] * 30)[token]

    def is_special(self, token: int) -> bool:
        return token in (EOS, END)


GRAMMARS = Grammars(Bytes, VOCABULARY, (EOS, END))


def allowed(constraint: Constraint) -> list[bool]:
    """Of each token, whether it may come next."""
    return allowed_tokens(torch.tensor(constraint.mask()[None]), VOCABULARY)[0].tolist()


def sampler_of(*params: SamplingParams, seed: int = 100) -> Sampler:
    sampler = Sampler({EOS, END}, CpuKernels(), GRAMMARS)
    for id, chosen in enumerate(params):
        sampler.add(NewRequest(id, (1,), chosen, seed + id))
    return sampler


def sampled(params: SamplingParams, seed: int, steps: int = 3000) -> bytes:
    """What random logits make of a grammar, up to its end."""
    sampler = sampler_of(params, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    output = b""
    for position in range(steps):
        (token,), _ = sampler.sample(torch.randn(1, VOCABULARY, generator=generator) * 3, [(0, position)]).wait()
        assert not sampler.failures
        if token in (EOS, END):
            return output
        output += TOKENS[token]
        if seed % 2:
            sampler.prepare()
    raise AssertionError(f"no end after {output[:200]!r}")


SCALARS: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(
        lambda low, n: {"type": "integer", "minimum": low, "maximum": low + n}, st.integers(-9, 99), st.integers(0, 50)
    ),
    st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 6)),
    st.builds(lambda values: {"enum": values}, st.lists(st.text(max_size=4), min_size=1, max_size=3)),
    st.just({"type": "string", "pattern": "^[a-c]{2,4}-\\d$"}),
)


def objects(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    def build(properties: dict[str, Any], required: int) -> dict[str, Any]:
        names = sorted(properties)[:required]
        return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}

    return st.builds(
        build, st.dictionaries(st.text('abé"', min_size=1, max_size=3), inner, max_size=3), st.integers(0, 3)
    )


SCHEMAS = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        objects(inner),
        st.builds(lambda item, n: {"type": "array", "items": item, "maxItems": n}, inner, st.integers(0, 3)),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=2)),
    ),
    max_leaves=5,
)


@settings(max_examples=60, deadline=None)
@given(schema=SCHEMAS, seed=st.integers(0, 999), greedy=st.booleans())
def test_any_logits_make_an_instance_of_the_schema(schema: dict[str, Any], seed: int, greedy: bool) -> None:
    temperature = 0.0 if greedy else 1.0
    text = sampled(SamplingParams(max_tokens=9999, temperature=temperature, grammar=json_schema_grammar(schema)), seed)
    jsonschema_rs.validate(schema, json.loads(text.decode()))


@pytest.mark.parametrize("pattern", [r"[ab]{3}\d", r"(foo|bar é)+x", r"👍{1,3}"])
def test_any_logits_make_a_match_of_the_pattern(pattern: str) -> None:
    for seed in range(6):
        text = sampled(SamplingParams(max_tokens=9999, grammar=regex_grammar(pattern)), seed).decode()
        assert re.fullmatch(pattern, text), text


def test_any_logits_make_one_of_the_choices() -> None:
    choices = ["yes", "no", 'may"be\n', "é👍"]
    params = SamplingParams(max_tokens=99, grammar=choice_grammar(choices))
    assert {sampled(params, seed).decode() for seed in range(40)} == set(choices)


def test_json_may_be_indented_but_not_padded() -> None:
    value = {"a": [1, {"b": None}], "c": "d"}
    text = json_schema_grammar({"type": "object"})

    def allows(output: str) -> bool:
        constraint = GRAMMARS.begin(text)
        for token in [*output.encode(), EOS]:
            if not allowed(constraint)[token]:
                return False
            constraint.accept(token)
        return True

    for form in ({}, {"indent": 2}, {"indent": "\t"}, {"separators": (",", ":")}):
        assert allows(json.dumps(value, **form))
    for padding in ("\n\n", "  ", "\n" + " " * 25):
        assert not allows("{" + padding + "}")


def test_requests_with_the_same_grammar_do_not_share_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars, compiled = Grammars(Bytes, VOCABULARY, (EOS, END)), []
    compile = grammar._compile
    monkeypatch.setattr(grammar, "_compile", lambda table, text: compiled.append(text) or compile(table, text))
    texts = [choice_grammar([f"ab{i}"]) for i in range(grammar.MAX_COMPILED + 1)]
    compiled.clear()
    first, second = grammars.begin(texts[0]), grammars.begin(texts[0])
    first.mask()
    first.accept(ord("a"))
    for constraint, token in ((first, ord("b")), (second, ord("a"))):
        assert allowed(constraint)[token]
    for text in texts:
        grammars.begin(text).mask()
    assert compiled == texts
    grammars.begin(texts[0]).mask()
    assert compiled == [*texts, texts[0]], "the one not used for the longest time was given up"


def test_a_mask_allows_what_the_grammar_continues_with() -> None:
    constraint = GRAMMARS.begin(choice_grammar(["true", "t👍"]))
    seen = []
    for token in (ord("t"), len(TOKENS) - 1):
        seen.append([token for token, may_come in enumerate(allowed(constraint)) if may_come])
        constraint.accept(token)
    assert seen[0] == [ord("t"), TOKENS.index(b"true")]
    assert seen[1] == [ord("r"), "👍".encode()[0], TOKENS.index("👍".encode())]
    assert [token for token, may_come in enumerate(allowed(constraint)) if may_come] == [EOS, END]


def test_the_rest_of_the_batch_is_as_without_grammars() -> None:
    others = [SamplingParams(temperature=0.0), SamplingParams(seed=4, presence_penalty=1.0)]
    constrained = SamplingParams(max_tokens=99, grammar=choice_grammar(["abababab"]))
    mixed, alone = sampler_of(*others, constrained), sampler_of(*others)
    for position in range(8):
        logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(position))
        together, _ = mixed.sample(logits, [(id, position) for id in range(3)]).wait()
        assert together[:2] == alone.sample(logits[:2], [(id, position) for id in range(2)]).wait()[0]
        mixed.prepare()


def test_a_preempted_request_goes_on_in_its_grammar() -> None:
    sampler = sampler_of(SamplingParams(max_tokens=99, grammar=choice_grammar(["xyz"])), SamplingParams())
    logits = torch.randn(2, VOCABULARY)
    assert sampler.sample(logits[:1], [(0, 0)]).wait()[0] == [ord("x")]
    sampler.sample(logits[1:], [(1, 0)]).wait()  # steps without it
    assert sampler.sample(logits[:1], [(0, 1)]).wait()[0] == [ord("y")]


@pytest.mark.parametrize("prepares", [False, True])
def test_a_grammar_that_cannot_be_followed_fails_its_own_request_alone(prepares: bool) -> None:
    grammars = {
        0: "start: nowhere",
        2: "start: <[99999]>",
        3: regex_grammar("(.{1,1000}){1,1000}"),  # grows more costly as it goes
    }
    sampler = sampler_of(
        *(SamplingParams(max_tokens=999, temperature=0.0, grammar=grammars.get(id)) for id in range(4))
    )
    logits = torch.zeros(4, VOCABULARY)
    logits[1, 7], logits[3, ord("a")] = 20.0, 20.0
    failed: dict[int, str] = {}
    for position in range(120):
        live = [id for id in range(4) if id not in failed]
        tokens, _ = sampler.sample(logits[live], [(id, position) for id in live]).wait()
        assert tokens[live.index(1)] == 7
        failed |= dict(sampler.failures)
        if prepares:
            sampler.prepare()
    assert sorted(failed) == [0, 2, 3]
    assert "unknown name" in failed[0]
    assert "lexer" in failed[3]


def test_a_failure_is_not_handed_on_to_the_next_request() -> None:
    params = SamplingParams(max_tokens=999, temperature=0.0, grammar=regex_grammar("(.{1,1000}){1,1000}"))
    logits = torch.zeros(1, VOCABULARY)
    logits[0, ord("a")] = 20.0
    lasted = []
    for _ in range(3):
        sampler, position = sampler_of(params), 0
        while not sampler.failures:
            sampler.sample(logits, [(0, position)]).wait()
            position += 1
        lasted.append(position)
    assert lasted[0] == lasted[1] == lasted[2] > 10


BAD_SCHEMAS = [
    3,
    {"type": "nope"},
    {"$ref": "#/nowhere"},
    {"type": "string", "pattern": "(("},
    {"not": {"type": "string"}},
    {"enum": []},
    False,
    {"enum": ["x" * grammar.MAX_GRAMMAR_CHARS]},
]


@pytest.mark.parametrize("schema", BAD_SCHEMAS, ids=range(len(BAD_SCHEMAS)))
def test_bad_schemas_are_told_before_anything_runs(schema: Any) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        json_schema_grammar(schema)


def test_bad_patterns_and_deep_schemas_are_told() -> None:
    for pattern in ("((", "(?=a)b", r"\p{Nope}"):
        with pytest.raises(ValueError, match=r"\w"):
            regex_grammar(pattern)
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"items": deep}
    with pytest.raises(ValueError, match="nested too deeply"):
        json_schema_grammar(deep)


@pytest.mark.parametrize("field", ["min_tokens", "ignore_eos"])
def test_nothing_else_may_decide_about_the_end(field: str) -> None:
    with pytest.raises(RequestError, match="decides when the output ends"):
        SamplingParams(max_tokens=5, grammar="start: /a/", **{field: 1}).validate()


def test_logit_bias_is_added_once_and_only_to_its_row() -> None:
    sampler = sampler_of(
        SamplingParams(temperature=0.0, logit_bias=((5, 3.5), (6, -100.0))), SamplingParams(temperature=0.0)
    )
    logits = torch.zeros(2, VOCABULARY)
    logits[:, 6], logits[:, 9], logits[:, 5] = 50.0, 3.0, -0.4
    before = logits.clone()
    for position in range(3):
        assert sampler.sample(logits, [(0, position), (1, position)]).wait()[0] == [5, 6]
    assert torch.equal(logits, before)
