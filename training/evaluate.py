"""Measure a checkpoint: recall by distance, held-out perplexity, a few answers; optionally write its card.

A value counts as recalled when the most likely token is right at every position of the answer, which is the
same as greedy decoding giving exactly that answer.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from corpus import read_corpus
from tasks import Rows, Stream
from tokenizer import ASSISTANT, END, USER, load_tokenizer

PROMPTS = (
    "Hello",
    "Who are you?",
    "Tell me about Moses.",
    "The number of Alice is 57213. What is the number of Alice?",
)


def spread(rows: Rows, rng: np.random.Generator, length: int, facts: list[np.ndarray]) -> np.ndarray:
    """Running text with these facts at random places in it, ``length`` tokens in all."""
    text = rows.text(rng, length - sum(len(f) for f in facts))
    cuts = np.sort(rng.integers(0, len(text) + 1, len(facts)))
    pieces = np.split(text, cuts)
    return np.concatenate([pieces[0], *(x for pair in zip(facts, pieces[1:], strict=True) for x in pair)])


def trial(
    rows: Rows, rng: np.random.Generator, distance: int, context: int, others: int, style: str
) -> tuple[np.ndarray, np.ndarray]:
    """One prompt and its answer; the fact ends ``distance`` tokens before the question starts."""
    keys = rows.keys(rng, others + 1)
    (key, value), *rest = keys
    fact = rows.fact(key, value)[0]
    tail = {
        "text": lambda: [rows.phrase(" What is the number of"), key, rows.phrase("?")],
        "chat": lambda: [rows.phrase(" What is the number of"), key, rows.phrase("?" + END)],
        "chat turns": lambda: [
            rows.phrase(END + ASSISTANT + "I will remember it." + END + USER + "What is the number of"),
            key,
            rows.phrase("?" + END),
        ],
    }[style]()
    answer = rows.phrase(" "), value, rows.phrase(".")
    if style != "text":
        answer = (rows.chat_answer(key, value, brief=False)[0],)
    before_length, after_length = context - distance - len(fact), distance
    before: list[np.ndarray] = []
    after: list[np.ndarray] = []
    for other_key, other_value in rest:
        piece = rows.fact(other_key, other_value)[0]
        room = [n - sum(map(len, side)) - len(piece) for n, side in ((before_length, before), (after_length, after))]
        early = rng.random() < before_length / (before_length + after_length)
        side = before if (early and room[0] > 20) or room[1] <= 20 else after
        if room[0 if side is before else 1] > 0:
            side.append(piece)
    start = np.array([], dtype=np.int64) if style == "text" else rows.phrase(USER)
    head = [
        start,
        spread(rows, rng, before_length - len(start), before),
        fact,
        spread(rows, rng, after_length, after),
    ]
    return np.concatenate([*head, *tail]), np.concatenate(answer)


@torch.no_grad()
def recall(
    model: torch.nn.Module, rows: Rows, args: argparse.Namespace, distance: int, style: str, trials: int
) -> float:
    """The share of trials answered exactly."""
    rng = np.random.default_rng([args.seed, distance, len(style)])
    made = [trial(rows, rng, distance, args.context, args.others, style) for _ in range(trials)]
    right = 0
    for begin in range(0, trials, args.batch):
        part = made[begin : begin + args.batch]
        longest = max(len(prompt) + len(answer) for prompt, answer in part)
        ids = np.zeros((len(part), longest), dtype=np.int64)
        for row, (prompt, answer) in enumerate(part):
            ids[row, : len(prompt) + len(answer)] = np.concatenate([prompt, answer])
        shortest = min(len(prompt) for prompt, _ in part)
        kept = longest - shortest + 1
        logits = model(torch.from_numpy(ids).to(model.device), use_cache=False, logits_to_keep=kept).logits
        guesses = logits.argmax(-1).cpu().numpy()
        for row, (prompt, answer) in enumerate(part):
            first = len(prompt) - 1 - (longest - kept)
            given = 1 if style != "text" else 0  # the assistant token is part of the prompt
            right += bool((guesses[row, first + given : first + len(answer)] == answer[given:]).all())
    return right / trials


@torch.no_grad()
def perplexity(model: torch.nn.Module, stream: Stream, width: int, windows: int) -> dict[str, float]:
    """Loss over consecutive windows of the held-out text."""
    count = min(windows, len(stream.ids) // width)
    total = 0.0
    for index in range(count):
        ids = torch.from_numpy(stream.ids[index * width : (index + 1) * width]).to(model.device)[None]
        logits = model(ids, use_cache=False).logits[0, :-1].float()
        total += torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
    per_token = total / (count * (width - 1))
    per_byte = per_token * len(stream.ids) / stream.bytes
    return {
        "tokens": count * (width - 1),
        "window": width,
        "nats_per_byte": round(per_byte, 4),
        "bits_per_byte": round(per_byte / math.log(2), 4),
        "perplexity_per_token": round(math.exp(per_token), 3),
    }


@torch.no_grad()
def answers(model: torch.nn.Module, folder: str) -> dict[str, str]:
    """Greedy answers to a few prompts, through the checkpoint's own chat template."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = {}
    for prompt in PROMPTS:
        chat = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids.to(model.device)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=80, do_sample=False)
        found[prompt] = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    return found


def write_card(folder: str, result: dict) -> None:
    """Write the model card from the template beside this file."""
    styles = list(result["recall"])
    table = ["| Distance (tokens) | " + " | ".join(styles) + " |", "|---:|" + "---:|" * len(styles)]
    for distance in result["recall"][styles[0]]:
        cells = (f"{100 * result['recall'][style][distance]:.1f} %" for style in styles)
        table.append(f"| {distance} | " + " | ".join(cells) + " |")
    samples = "\n\n".join(f"> **{prompt}**\n>\n> {text}" for prompt, text in result["answers"].items())
    template = (Path(__file__).parent / "card.md").read_text(encoding="utf-8")
    for name, value in (
        ("RECALL_TABLE", "\n".join(table)),
        ("SAMPLES", samples),
        *((key.upper(), str(value)) for key, value in {**result, **result["held_out"]}.items()),
    ):
        template = template.replace("{{" + name + "}}", value)
    (Path(folder) / "README.md").write_text(template, encoding="utf-8")


def main() -> None:
    """Evaluate and print JSON."""
    parser = argparse.ArgumentParser(description="Evaluate Scribe.")
    parser.add_argument("--model", required=True, help="the checkpoint's folder")
    parser.add_argument("--corpus", default="training/kjv.txt.gz")
    parser.add_argument("--distances", default="100,500,1000,2000,3000,4000")
    parser.add_argument("--context", type=int, default=4200, help="tokens before the question")
    parser.add_argument("--others", type=int, default=8, help="other keys in the context")
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--windows", type=int, default=1000, help="most windows of held-out text")
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--write-card", action="store_true", help="write README.md into the checkpoint")
    parser.add_argument("--json", help="also write the result to this file")
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    dtype = torch.bfloat16 if cuda else torch.float32
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).to("cuda" if cuda else "cpu").eval()
    corpus = read_corpus(args.corpus)
    tokenizer = load_tokenizer(args.model)
    rows = Rows(tokenizer, corpus, corpus.held_out)
    result = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "arithmetic": str(dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name() if cuda else "a CPU",
        "trials": args.trials,
        "context": args.context,
        "keys": args.others + 1,
        "held_out": perplexity(model, Stream(tokenizer, corpus.held_out), 1024, args.windows),
        "recall": {
            style: {
                distance: recall(model, rows, args, int(distance), style, args.trials)
                for distance in args.distances.split(",")
            }
            for style in ("text", "chat", "chat turns")
        },
        "answers": answers(model, args.model),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if args.json:
        Path(args.json).write_text(text + "\n", encoding="utf-8")
    if args.write_card:
        write_card(args.model, result)


if __name__ == "__main__":
    main()
