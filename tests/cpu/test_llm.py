"""Offline generation through the real engine: processes, sockets, scheduler and text."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from splash.core.errors import CapacityError, CheckpointError, ConfigError, RequestError, WorkerError
from splash.core.request import SamplingParams
from splash.engine import executor
from splash.engine.config import AttentionOptions
from splash.engine.executor import LocalGroup
from splash.llm import LLM
from splash.model.choice import ModelChoice
from splash.platform.cpu.platform import CpuPlatform

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_checkpoint: Callable[[str], Path]) -> Iterator[LLM]:
    with LLM(str(tiny_checkpoint("base")), ranks=2, layout="dop", kv_cache_gib=0.1, page_size=16) as engine:
        yield engine


def test_text_equals_transformers(llm: LLM, tiny_checkpoint: Callable[[str], Path]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = tiny_checkpoint("base")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    prompts = ["The quick brown", "How many ranks hold this page? Every", "é"]
    for output in llm.generate(prompts, GREEDY):
        ids = tokenizer(output.prompt, return_tensors="pt").input_ids
        assert output.prompt_tokens == tuple(ids[0].tolist())
        with torch.no_grad():
            expected = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
        generated = expected[0, ids.shape[1] :].tolist()
        assert list(output.tokens) == generated
        assert output.text == tokenizer.decode(generated, skip_special_tokens=True)
        assert output.finish_reason == "length"


def test_as_much_is_copied_ahead_as_suits_the_platform(llm: LLM) -> None:
    assert llm.engine.loop.switcher.step_bytes == CpuPlatform.copy_mib * 2**20 > 0


def test_a_seed_gives_the_same_text_whatever_the_batch(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, temperature=1.0, top_p=0.9, seed=7, ignore_eos=True)
    alone = llm.generate("The quick", params)[0]
    others = [SamplingParams(max_tokens=9, temperature=1.3, seed=seed, ignore_eos=True) for seed in range(3)]
    crowd = llm.generate(["a", "b", "The quick", "c"], [*others[:2], params, others[2]])
    assert crowd[2].tokens == alone.tokens
    assert crowd[2].text == alone.text
    assert llm.generate("The quick", SamplingParams(max_tokens=20, seed=8, ignore_eos=True))[0].tokens != alone.tokens


def test_priorities_change_the_order_and_not_the_text(llm: LLM) -> None:
    prompts = ["a", "b", "c"]
    plain = llm.generate(prompts, GREEDY)
    assert [output.text for output in llm.generate(prompts, GREEDY, priority=[2, 0, 1])] == [o.text for o in plain]
    assert [output.text for output in llm.generate(prompts, GREEDY, priority=-1)] == [o.text for o in plain]
    with pytest.raises(ValueError, match="priority: 2 for 3 prompts"):
        llm.generate(prompts, GREEDY, priority=[1, 2])
    with pytest.raises(RequestError, match="priority: must be a 64-bit integer"):
        llm.generate(prompts, GREEDY, priority=2**70)


def test_stop_strings_and_tokens(llm: LLM) -> None:
    whole = llm.generate("The quick", GREEDY)[0]
    stop = whole.text[3:5]
    cut = llm.generate("The quick", SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, stop=(stop,)))[0]
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    token = whole.tokens[4]
    first = whole.tokens.index(token)
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, stop_token_ids=(token,))
    ended = llm.generate("The quick", params)[0]
    assert ended.tokens == whole.tokens[: first + 1]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", token)


def test_logprobs(llm: LLM) -> None:
    output = llm.generate("The quick", SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=3))[0]
    assert len(output.logprobs) == 4
    for token, entry in zip(output.tokens, output.logprobs, strict=True):
        assert entry.token == token == entry.top[0][0]
        assert entry.logprob == entry.top[0][1] <= 0.0
        assert len(entry.top) == 3


@pytest.mark.parametrize("layout", ["tp", "dp", "cp", "dop", "dcp"])
def test_log_probabilities_of_prompts_equal_transformers(
    llm: LLM, tiny_checkpoint: Callable[[str], Path], layout: str
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint("base"))
    prompts = [[(7 * i * i + 3 * length) % 500 for i in range(length)] for length in (1, 2, 40, 300, 600)]
    scored = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, prompt_logprobs=2)
    llm.switch(layout)
    batch = [prompt for prompt in prompts for _ in range(2)]  # the second of each could use the first one's pages
    outputs = llm.generate(batch, [GREEDY, scored] * len(prompts))
    assert all(not output.prompt_logprobs for output in outputs[::2])
    for prompt, output in zip(prompts, outputs[1::2], strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([prompt])).logits[0].log_softmax(dim=-1)
        assert [entry.token for entry in output.prompt_logprobs] == prompt[1:]
        assert [entry.logprob for entry in output.prompt_logprobs] == pytest.approx(
            [float(expected[i, token]) for i, token in enumerate(prompt[1:])], abs=2e-3
        )
        for i, entry in enumerate(output.prompt_logprobs):
            assert entry.top[0][1] == pytest.approx(float(expected[i].max()), abs=2e-3)
        assert output.tokens == outputs[2 * prompts.index(prompt)].tokens[:2]


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ([], GREEDY, "prompt"),
        ([1, 512], GREEDY, "prompt"),
        ([-1], GREEDY, "prompt"),
        ([1] * 2048, GREEDY, "prompt"),
        ([1], SamplingParams(max_tokens=0), "max_tokens"),
        ([1], SamplingParams(max_tokens=-3), "max_tokens"),
        ([1], SamplingParams(temperature=-1.0), "temperature"),
        ([1], SamplingParams(top_p=0.0), "top_p"),
        ([1], SamplingParams(stop_token_ids=(9999,)), "stop_token_ids"),
        ([1], SamplingParams(stop_token_ids=(2**70,)), "stop_token_ids"),
        ([1], SamplingParams(logit_bias=((512, 1.0),)), "logit_bias"),
        ([1], SamplingParams(top_k=2**70), "top_k"),
        ([1], SamplingParams(max_tokens=2**70), "max_tokens"),
    ],
)
def test_bad_requests_harm_nobody(llm: LLM, prompt: list[int], params: SamplingParams, field: str) -> None:
    with pytest.raises(RequestError, match=field) as caught:
        llm.generate([[5, 6, 7], prompt], [GREEDY, params])
    assert caught.value.field == field
    assert llm.generate([5, 6, 7], GREEDY)[0].finish_reason == "length"
    stats = llm.engine.stats()
    assert stats.free_pages == stats.total_pages


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"layout": "xp"}, ConfigError, "tp, dp, cp, dop, dcp"),
        ({"ranks": 0}, ConfigError, "ranks"),
        ({"ranks": 3}, ConfigError, "3 ranks do not divide 8 heads; use dp, cp"),
        ({"dtype": "int4"}, ConfigError, "float32, bfloat16"),
        ({"max_model_len": 9999}, ConfigError, "2048"),
        ({"kv_cache_gib": 1e-4}, CapacityError, "kv_cache_gib"),
        ({"model": "/nonexistent"}, CheckpointError, "/nonexistent"),
        ({"hardware": "vax"}, ConfigError, "vax"),
        ({"load_format": "pickle"}, ConfigError, "safetensors, dummy, dummy_same_experts"),
        ({"mem_fraction": 1.5}, ConfigError, "mem_fraction: must be above 0 and at most 1"),
        (
            {"attention": AttentionOptions("triton")},
            ConfigError,
            "attention.backend: 'triton' does not work on the CPU",
        ),
    ],
)
def test_bad_options_are_refused(
    tiny_checkpoint: Callable[[str], Path], options: dict[str, object], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        LLM(**{"model": str(tiny_checkpoint("base")), "ranks": 2, "kv_cache_gib": 0.1, **options})


def test_random_weights_need_no_checkpoint(tiny_checkpoint: Callable[[str], Path]) -> None:
    """Two layers of a model that is not there, in the shapes of its configuration, the same on every start."""
    config = ModelChoice("few", str(tiny_checkpoint("base")), num_layers=2).contents()
    tokens = []
    for layout, ranks in (("dop", 2), ("dp", 1)):
        options = {"load_format": "dummy", "model_config": config, "kv_cache_gib": 0.05}
        with LLM("not/there", layout=layout, ranks=ranks, **options) as llm:
            assert llm.engine.model_config.spec.num_layers == 2
            tokens.append(llm.generate([5, 6, 7], GREEDY)[0].tokens)
    assert tokens[0] == tokens[1] and len(set(tokens[0])) > 1


def test_damaged_weights_are_refused(tiny_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    source = tiny_checkpoint("base")
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        LLM(str(tmp_path), ranks=2, kv_cache_gib=0.1)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="only safetensors are read"):
        LLM(str(tmp_path), ranks=1, kv_cache_gib=0.1)


def test_a_rank_that_stops_is_named_though_no_collective_can(
    tiny_checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a device whose collectives are queued, where rank 0 waits and cannot tell for whom."""
    monkeypatch.setattr(executor, "COLLECTIVE_SHARE", 100.0)
    monkeypatch.setattr(executor, "STOP_TIMEOUT_S", 0.5)
    with LLM(
        str(tiny_checkpoint("base")), ranks=3, layout="dp", kv_cache_gib=0.05, step_timeout_s=2.0, max_restarts=0
    ) as llm:
        llm.generate([5, 6, 7], GREEDY)
        group = llm.engine.loop.executor
        assert isinstance(group, LocalGroup)
        os.kill(group.pids[1], signal.SIGSTOP)
        with pytest.raises(WorkerError, match=r"held up by rank 1$") as stopped:
            llm.generate([5, 6, 7], GREEDY)
        assert stopped.value.rank == 1


def test_bfloat16_is_close_to_float32(llm: LLM, tiny_checkpoint: Callable[[str], Path]) -> None:
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=5)
    with LLM(str(tiny_checkpoint("base")), ranks=2, layout="dcp", dtype="bfloat16", kv_cache_gib=0.05) as narrow:
        best = [dict(engine.generate(list(range(5, 45)), params)[0].logprobs[0].top) for engine in (llm, narrow)]
    shared = best[0].keys() & best[1].keys()
    assert len(shared) >= 3
    assert all(abs(best[0][token] - best[1][token]) < 0.15 for token in shared)
