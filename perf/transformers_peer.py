"""transformers' `generate` as a peer, in a process of its own so that its memory and start-up are its own too."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from perf.common import pss_mib

ATTENTION = ("sdpa", "eager")
EXPERTS = ("grouped_mm", "batched_mm", "eager")


@dataclass(frozen=True)
class PeerTask:
    """The work of one turn. `choice` is (attention, experts, threads), or None to try all and keep the fastest."""

    model: str
    dtype: str
    prompts: Sequence[Sequence[int]]
    output_len: int
    choice: tuple[str, str, int] | None = None


def run_peer(task: PeerTask, timeout_s: float) -> dict[str, Any]:
    """Load, generate and measure in a fresh process.

    Returns:
        choice; startup_s until the first token could be asked for; pss_mib after generating; ttft_s for one prompt;
        tok_s of one prompt and of all of them in one batch; and the batch's tokens. Without a given choice also
        `tried`, the batch's tok_s of each, and `model`, its parameters and ceilings.

    Raises:
        RuntimeError: the process failed, with its traceback, or did not answer in time.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_serve_turn, args=(task, sender, time.time()))
    process.start()
    sender.close()
    try:
        if not receiver.poll(timeout_s):
            raise RuntimeError(f"transformers did not finish within {timeout_s:.0f} s")
        kind, value = receiver.recv()
    except EOFError:
        raise RuntimeError("transformers' process ended without an answer") from None
    finally:
        process.join(5)
        if process.is_alive():
            process.kill()
            process.join()
    if kind == "error":
        raise RuntimeError(f"transformers failed:\n{value}")
    return value


def _serve_turn(task: PeerTask, sender: Connection, launched: float) -> None:
    try:
        sender.send(("result", _turn(task, launched)))
    except Exception:
        sender.send(("error", traceback.format_exc()))


def _turn(task: PeerTask, launched: float) -> dict[str, Any]:
    import torch
    import transformers

    torch.set_grad_enabled(False)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    all_cores = len(os.sched_getaffinity(0))
    choice = task.choice or (ATTENTION[0], EXPERTS[0], all_cores)
    model = _load(task, choice)
    result: dict[str, Any] = {"startup_s": time.time() - launched}
    batch = torch.tensor([list(prompt) for prompt in task.prompts])

    if task.choice is None:
        result["model"] = _size_and_ceilings(model)
        tried: dict[tuple[str, str, int], float] = {}

        def attempt(candidate: tuple[str, str, int]) -> None:
            model = _load(task, candidate)
            _generate(model, batch, 4)
            seconds = min(_generate(model, batch, task.output_len)[0] for _ in range(2))
            tried[candidate] = batch.shape[0] * task.output_len / seconds

        for attention, experts in itertools.product(ATTENTION, EXPERTS):
            attempt((attention, experts, all_cores))
        attention, experts, _ = max(tried, key=lambda candidate: tried[candidate])
        attempt((attention, experts, 1))  # small models lose more by waiting for threads than they gain
        choice = max(tried, key=lambda candidate: tried[candidate])
        names = {candidate: "{}/{}/{} threads".format(*candidate) for candidate in tried}
        result["tried"] = {names[candidate]: round(tok_s, 1) for candidate, tok_s in tried.items()}
        model = _load(task, choice)

    _generate(model, batch, 4)
    _generate(model, batch[:1], 4)
    ttft = [_generate(model, batch[row : row + 1], 1)[0] for row in range(min(4, batch.shape[0]))]
    single, _ = _generate(model, batch[:1], task.output_len)
    wall, tokens = _generate(model, batch, task.output_len)
    return result | {
        "choice": choice,
        "ttft_s": ttft,
        "single_tok_s": task.output_len / single,
        "batch_tok_s": batch.shape[0] * task.output_len / wall,
        "tokens": tokens,
        "pss_mib": pss_mib(os.getpid()),
    }


def _load(task: PeerTask, choice: tuple[str, str, int]) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    attention, experts, threads = choice
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(
        task.model,
        dtype=getattr(torch, task.dtype),
        attn_implementation=attention,
        experts_implementation=experts,
    ).eval()
    model.generation_config.eos_token_id = None  # every request generates as many tokens as it was asked for
    model.generation_config.pad_token_id = 0
    return model


def _generate(model: Any, prompts: Any, num_tokens: int) -> tuple[float, list[list[int]]]:
    """Greedy tokens for prompts [batch, length] of equal length, and the seconds it took."""
    import torch

    start = time.perf_counter()
    output = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=num_tokens,
        do_sample=False,
        use_cache=True,
    )
    seconds = time.perf_counter() - start
    assert output.shape[1] == prompts.shape[1] + num_tokens
    return seconds, output[:, prompts.shape[1] :].tolist()


def _size_and_ceilings(model: Any) -> dict[str, float]:
    """What a token costs, and what this machine can do: multiply matrices, and read weights as decoding reads them."""
    import torch

    routed, dense = 0, 0
    for name, parameter in model.named_parameters():
        if ".experts." in name and ".shared_experts." not in name:
            routed += parameter.numel()
        elif "embed_tokens" not in name or model.config.tie_word_embeddings:
            dense += parameter.numel()
    dtype = next(model.parameters()).dtype
    size = 2048
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    gemm = 2 * size**3 / _fastest(lambda: a @ b)
    weights = torch.randn(max(1, (routed + dense) // 4096), 4096).to(dtype)  # a model's worth: it may fit in a cache
    row = torch.randn(1, 4096).to(dtype)
    seconds = min(_fastest(lambda: torch.nn.functional.linear(row, weights)), _fastest(weights.sum))
    read = weights.numel() * weights.element_size() / seconds
    return {
        "dense_parameters": dense,
        "routed_parameters": routed,
        "expert_share": getattr(model.config, "num_experts_per_tok", 1) / getattr(model.config, "n_routed_experts", 1),
        "bytes_per_parameter": weights.element_size(),
        "gemm_gflop_s": round(gemm / 1e9, 1),
        "read_gb_s": round(read / 1e9, 1),
    }


def _fastest(work: Callable[[], object], seconds: float = 1.0) -> float:
    """Seconds of the fastest call within about `seconds`: a ceiling is the best that was seen."""
    best, deadline = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best
