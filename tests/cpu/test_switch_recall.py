"""The shipped model recalls as well while its layout keeps changing as when it does not: a damaged page would show."""

from __future__ import annotations

from splash.core.request import SamplingParams
from splash.engine.outputs import GenerationRequest
from splash.llm import LLM
from tests.cpu.test_parity import _recall_prompt

WALK = ("dp", "cp", "dop", "dcp", "tp", "cp", "tp", "dop", "dp", "tp", "dcp", "dp", "dcp", "cp", "dcp", "dop", "cp")
PARAMS = SamplingParams(max_tokens=7, temperature=0.0, ignore_eos=True)


def test_recall_is_as_good_under_continuous_switching() -> None:
    asked = [_recall_prompt(length, seed) for seed, length in enumerate((2000, 300, 900, 1500, 600, 1200))]
    with LLM(ranks=2, layout="tp", kv_cache_gib=0.2, max_batched_tokens=128, prefix_cache=False) as llm:
        unswitched = [output.tokens for output in llm.generate([prompt for prompt, _ in asked], PARAMS)]
        engine, tokens, switches = llm.engine, {str(number): [] for number in range(len(asked))}, 0
        for number, (prompt, _) in enumerate(asked):
            engine.add_request(GenerationRequest(str(number), prompt, PARAMS))
        while engine.has_work:
            if engine.switcher.active is None:
                engine.switch(WALK[switches % len(WALK)], ("layerwise", "precopy", "blocking")[switches % 3])
                switches += engine.scheduler.has_work
            for output in engine.step():
                tokens[output.id] += output.tokens
            if not engine.scheduler.has_work:
                engine.switcher.abort()
        committed = sum(record.status == "committed" for record in engine.switcher.history)
        texts = [llm.engine.tokenizer.decode(tokens[str(number)]) for number in range(len(asked))]
    assert committed >= 15
    assert [tuple(own) for own in tokens.values()] == unswitched
    assert all(text.startswith(answer) for text, (_, answer) in zip(texts, asked, strict=True))
