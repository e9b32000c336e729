"""Train Scribe.

The whole run is governed by the clock: ``--seconds`` bounds it from start to saved checkpoint, and both the
curriculum of row lengths and the learning rate follow the elapsed time.  The text is small, so that a model
soon learns it by heart; once the validation loss stops falling, running text is learned from the best averaged
weights so far instead (class ``Teacher``).  See README.md for the commands.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

START = time.monotonic()
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402
from transformers import DeepseekV3ForCausalLM  # noqa: E402

from corpus import read_corpus  # noqa: E402
from model import balance_experts, prepare_for_training, save_checkpoint, scribe_config  # noqa: E402
from tasks import ANSWER_WEIGHT, TEXT_WEIGHT, Batches, Rows, Stream, task_phrases  # noqa: E402
from tokenizer import load_tokenizer, train_tokenizer  # noqa: E402


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train Scribe.")
    parser.add_argument("--corpus", default="training/kjv.txt.gz")
    parser.add_argument("--out", required=True, help="folder for the Hugging Face checkpoint")
    parser.add_argument("--state", required=True, help="folder for the training state, for --resume")
    parser.add_argument("--resume", help="training state to continue from")
    parser.add_argument("--seconds", type=float, default=480, help="time from start to saved checkpoint")
    parser.add_argument("--lengths", default="256,1024,2304,4352", help="row lengths of the curriculum")
    parser.add_argument("--fractions", default="0.10,0.25,0.20,0.45", help="share of the time for each length")
    parser.add_argument("--batch-tokens", type=int, default=65536)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--decay-from", type=float, default=0.55, help="share of the time at the full rate")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--patience", type=int, default=3, help="reports without a better validation loss")
    parser.add_argument("--bias-rate", type=float, default=1e-3, help="step of the router's selection bias")
    parser.add_argument("--workers", type=int, default=10)
    parser.add_argument("--vocab", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--report-every", type=float, default=10)
    parser.add_argument("--compile", action="store_true", help="compile the decoder layers")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


@dataclass
class Clock:
    """The time-based schedule."""

    begin: float
    end: float
    peak: float
    decay_from: float

    def progress(self) -> float:
        """Elapsed share of the training time."""
        return min(1.0, (time.monotonic() - self.begin) / max(1e-6, self.end - self.begin))

    def rate(self, step: int) -> float:
        """Learning rate: warm-up over 100 steps, level, then linear decay to a hundredth."""
        decay = (1 - self.progress()) / max(1e-6, 1 - self.decay_from)
        return self.peak * min(1.0, (step + 1) / 100) * max(0.01, min(1.0, decay))


def attention_kernels(device: torch.device) -> list[SDPBackend]:
    """Time the attention kernels at this model's head sizes; return those that work, fastest first."""
    if device.type != "cuda":
        return []
    q, k = (torch.randn(8, 8, 4352, 96, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in "qk")
    v = torch.randn(8, 8, 4352, 32, device=device, dtype=torch.bfloat16, requires_grad=True)
    times: dict[SDPBackend, float] = {}
    expected: torch.Tensor | None = None
    for backend in (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        try:
            with warnings.catch_warnings(action="ignore"), sdpa_kernel([backend]):
                for _ in range(4):
                    torch.cuda.synchronize()
                    begin = time.monotonic()
                    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
                    (gradient,) = torch.autograd.grad(out.float().square().sum(), q)
                    torch.cuda.synchronize()
                    times[backend] = time.monotonic() - begin
        except RuntimeError as error:
            print(f"attention {backend.name}: {str(error).splitlines()[0][:100]}", flush=True)
            continue
        expected = gradient.float() if expected is None else expected
        if not (gradient.float() - expected).norm() < 0.05 * expected.norm():
            print(f"attention {backend.name}: wrong gradient", flush=True)
            del times[backend]
    print("attention, ms a pass:", {b.name: round(t * 1e3, 2) for b, t in times.items()}, flush=True)
    return [*sorted(times, key=times.__getitem__), SDPBackend.MATH]


def weighted_loss(
    logits: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    digits: torch.Tensor,
    taught: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Weighted cross-entropy, and the sums that the progress report is made of.

    Given ``taught``, the teacher's probabilities, running text is learned from them; a row of zeros there
    leaves its position out.
    """
    targets, weights = ids[:, 1:], weights[:, 1:]
    logs = functional.log_softmax(logits[:, :-1].float(), dim=-1)
    losses = hard = -logs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    text = weights == TEXT_WEIGHT
    if taught is not None:
        losses = torch.where(text, -(taught[:, :-1] * logs).sum(-1), hard)
    with torch.no_grad():
        answer = (weights == ANSWER_WEIGHT) & torch.isin(targets, digits)
        right = logits[:, :-1].argmax(-1) == targets
        sums = {
            "text_loss": (hard * text).sum(),
            "text": text.sum(),
            "right": (right & answer).sum(),
            "answer": answer.sum(),
        }
    return (losses * weights).sum() / weights.sum(), sums


@torch.no_grad()
def text_loss(
    model: DeepseekV3ForCausalLM, stream: Stream, width: int, autocast: contextlib.AbstractContextManager
) -> float:
    """Nats per byte over the beginning of a text, in windows."""
    device = model.lm_head.weight.device
    training = model.training
    model.eval()
    count = min(16384 // width if device.type == "cuda" else 1, len(stream.ids) // width)
    ids = torch.from_numpy(stream.ids[: count * width]).view(count, width).to(device)
    with autocast:
        logits = model(ids, use_cache=False).logits
    _, sums = weighted_loss(logits, ids, torch.ones_like(ids, dtype=torch.float32), ids[0, :0])
    model.train(training)
    return (sums["text_loss"] / sums["text"]).item() * len(stream.ids) / stream.bytes


class Teacher:
    """A running average of the weights, and a copy of the best average so far.

    Once ``patience`` reports in a row have brought no better validation loss, ``active`` turns on, and running
    text is learned from that copy: the model keeps what it knew of language before it began to learn the text
    by heart, while it goes on learning to recall.  A better average replaces the copy at any time.
    """

    def __init__(self, make: Callable[[], DeepseekV3ForCausalLM], patience: int, decay: float = 0.998):
        self.average, self.best = make(), make()
        self.patience, self.decay = patience, decay
        self.loss, self.waited, self.active = float("inf"), 0, False

    @torch.no_grad()
    def follow(self, model: DeepseekV3ForCausalLM, step: int) -> None:
        """Move the average a little toward the model."""
        share = 1 - min(self.decay, (step + 1) / (step + 10))
        torch._foreach_lerp_(list(self.average.parameters()), list(model.parameters()), share)
        for mine, its in zip(self.average.buffers(), model.buffers(), strict=True):
            mine.copy_(its)

    def judge(self, loss: float) -> None:
        """Take note of the average's validation loss."""
        self.waited += 1
        if loss < self.loss:
            self.loss, self.waited = loss, 0
            self.best.load_state_dict(self.average.state_dict())
        self.active = self.active or 0 < self.patience <= self.waited

    @torch.no_grad()
    def teach(self, ids: torch.Tensor, longest: int = 1024, blind: int = 128) -> torch.Tensor:
        """The best copy's probabilities for the token after each.

        It may never have seen rows as long as the present ones, so it reads them in chunks; but for a row's
        own beginning, the first tokens of each chunk are left out.
        """
        rows, length = ids.shape
        chunks = max(1, length // longest)
        while length % chunks:
            chunks += 1
        logits = self.best(ids.view(rows * chunks, length // chunks), use_cache=False).logits
        taught = logits.float().softmax(-1).view(rows, chunks, length // chunks, -1)
        taught[:, 1:, : min(blind, length // chunks // 4)] = 0
        return taught.view(rows, length, -1)

    def state(self) -> dict[str, object]:
        """What a later run needs."""
        scalars = {"loss": self.loss, "waited": self.waited, "active": self.active}
        return {"average": self.average.state_dict(), "best": self.best.state_dict(), **scalars}

    def restore(self, state: dict) -> None:
        """Continue from what :meth:`state` returned."""
        self.average.load_state_dict(state["average"])
        self.best.load_state_dict(state["best"])
        self.loss, self.waited, self.active = state["loss"], state["waited"], state["active"]


def main() -> None:
    """Train and save."""
    args = parse_arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    corpus = read_corpus(args.corpus)
    if args.resume:
        tokenizer = load_tokenizer(args.resume)
    else:
        tokenizer = train_tokenizer(corpus, task_phrases(), args.vocab)
    rows = Rows(tokenizer, corpus)
    validation = Stream(tokenizer, corpus.validation)
    config = scribe_config(tokenizer, args.layers)
    model = DeepseekV3ForCausalLM(config).to(device)
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": args.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=device.type == "cuda")
    step, seed, seen = 0, args.seed, 0

    def reader() -> DeepseekV3ForCausalLM:
        copy = DeepseekV3ForCausalLM(config).to(device).eval()
        copy.load_state_dict(model.state_dict())
        prepare_for_training(copy, 0.0)
        return copy

    teacher = Teacher(reader, args.patience)
    if args.resume:
        state = torch.load(Path(args.resume) / "state.pt", map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        teacher.restore(state["teacher"])
        step, seen = state["step"], state["seen"]
        seed += step
    digits = torch.from_numpy(rows.digits).to(device)
    prepare_for_training(model, args.dropout)
    if args.compile:
        for layer in model.model.layers:
            layer.compile(dynamic=False)
    kernels = attention_kernels(device)
    count = sum(p.numel() for p in parameters)
    print(
        f"{count / 1e6:.2f} M parameters, {len(rows.stream.ids)} tokens of text, ready at {_elapsed()} s",
        flush=True,
    )

    lengths = [int(x) for x in args.lengths.split(",")]
    shares = np.cumsum([float(x) for x in args.fractions.split(",")])
    shares = shares / shares[-1]
    clock = Clock(time.monotonic(), START + args.seconds - min(20.0, args.seconds / 8), args.lr, args.decay_from)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
    model.train()
    for length, share in zip(lengths, shares, strict=True):
        per_batch = max(1, args.batch_tokens // length)
        teacher.waited = 0
        loader = DataLoader(
            Batches(rows, per_batch, length, seed),
            batch_size=None,
            num_workers=args.workers,
            prefetch_factor=4 if args.workers else None,
            pin_memory=device.type == "cuda",
        )
        totals: dict[str, torch.Tensor] = {}
        tokens, last, worst = 0, time.monotonic(), 0.0
        for ids, weights in loader:
            ids, weights = ids.to(device, non_blocking=True).long(), weights.to(device, non_blocking=True)
            rate = clock.rate(step)
            for group in optimizer.param_groups:
                group["lr"] = rate
            with autocast, sdpa_kernel(kernels, set_priority=True) if kernels else contextlib.nullcontext():
                taught = teacher.teach(ids) if teacher.active else None
                loss, sums = weighted_loss(model(ids, use_cache=False).logits, ids, weights, digits, taught)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            worst = balance_experts(model, args.bias_rate * min(1.0, rate / args.lr))
            teacher.follow(model, step)
            totals = {name: value + totals.get(name, 0) for name, value in sums.items()}
            step += 1
            tokens += ids.numel()
            seen += ids.numel()
            if step % 8 == 0 and device.type == "cuda":
                torch.cuda.synchronize()
            now = time.monotonic()
            finished = clock.progress() >= share
            if now - last >= args.report_every or finished:
                sums = {name: float(value) for name, value in totals.items()}
                speed = tokens / (now - last)
                teacher.judge(text_loss(teacher.average, validation, min(1024, length), autocast))
                print(
                    f"{_elapsed():5d} s  step {step:5d}  length {length:4d}  lr {rate:.1e}  "
                    f"text {sums['text_loss'] / max(1, sums['text']):.3f} nats/token  "
                    f"validation {text_loss(model, validation, min(1024, length), autocast):.4f} "
                    f"best {teacher.loss:.4f}{' teaching' if teacher.active else ''} nats/byte  "
                    f"digits {sums['right'] / max(1, sums['answer']):.4f}  "
                    f"load {max(float(s) for s in worst):.2f}  {speed / 1e3:.0f}k tok/s",
                    flush=True,
                )
                balance_experts(model, 0.0)
                totals, tokens, last = {}, 0, time.monotonic()
            if finished:
                break
        del loader

    state_folder = Path(args.state)
    state_folder.mkdir(parents=True, exist_ok=True)
    torch.save(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "teacher": teacher.state(),
            "step": step,
            "seen": seen,
        },
        state_folder / "state.pt",
    )
    tokenizer.save(str(state_folder / "tokenizer.json"))
    save_checkpoint(model, tokenizer, args.out)
    print(f"saved {args.out} after {_elapsed()} s; {step} steps, {seen} tokens in all", flush=True)


def _elapsed() -> int:
    """Whole seconds since the program started."""
    return round(time.monotonic() - START)


if __name__ == "__main__":
    main()
