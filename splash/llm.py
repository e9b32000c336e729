"""LLM: offline generation.

from splash import LLM, SamplingParams

with LLM(model="DIR", layout="dop", ranks=4) as llm:
    for output in llm.generate(["In the beginning"], SamplingParams(max_tokens=64)):
        print(output.text)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from splash.core.request import SamplingParams, TokenLogprob
from splash.engine.config import EngineConfig
from splash.engine.engine import Engine
from splash.engine.outputs import GenerationRequest
from splash.scheduler.policy import PolicyConfig
from splash.switch.orders import SwitchRecord

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Generation:
    """The whole output for one prompt. Fields as in `splash.engine.outputs.RequestOutput`."""

    prompt: Prompt
    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: str
    stop_reason: str | int | None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


class LLM:
    """A model served to this process. Closing it, or leaving its `with` block, ends the ranks."""

    def __init__(
        self, model: str = "builtin:scribe", *, progress: Callable[[str], None] | None = None, **options: Any
    ) -> None:
        """Start an engine.

        Args:
            model: directory of a Hugging Face checkpoint, or "builtin:scribe" for the model that ships with SPLASH.
            progress: receives a line for each thing that start-up does.
            options: fields of `splash.engine.config.EngineConfig`: ranks, layout, dtype, ... A policy may be given by
                its name, and has the description of this machine where it needs one.

        Raises:
            SplashError: as `splash.engine.engine.Engine`.
        """
        if isinstance(options.get("policy"), str):
            options["policy"] = PolicyConfig(options["policy"])
        config = EngineConfig(model=model, **options)
        if config.policy.kind == "cost":
            from splash.machine import with_description  # it needs Hydra, which nothing else here does

            config = with_description(config)
        self.engine = Engine(config, progress or (lambda line: None))
        self._next_id = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        progress_bar: bool = False,
    ) -> list[Generation]:
        """Generate for every prompt, batched as memory allows, and return in prompt order.

        Args:
            prompts: text, token ids, or a list of either.
            params: one for all prompts, or one for each.
            priority: one for all prompts, or one for each; those of a lower number are served earlier.
            progress_bar: show finished prompts and tokens a second on standard error.

        Raises:
            RequestError: a prompt or its parameters cannot be served; nothing has been generated.
            WorkerError: a rank died.
        """
        single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        batch: list[Any] = [prompts] if single else list(prompts)
        each = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(batch)
        if len(each) != len(batch):
            raise ValueError(f"params: {len(each)} for {len(batch)} prompts; give one, or one for each")
        priorities = [priority] * len(batch) if isinstance(priority, int) else list(priority)
        if len(priorities) != len(batch):
            raise ValueError(f"priority: {len(priorities)} for {len(batch)} prompts; give one, or one for each")
        requests = []
        for prompt, chosen, importance in zip(batch, each, priorities, strict=True):
            tokens = self.engine.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            requests.append(GenerationRequest(str(self._next_id), tuple(tokens), chosen, importance))
            self._next_id += 1
        try:
            for request in requests:
                self.engine.add_request(request)
        except Exception:
            self._drop(requests)
            raise
        try:
            return self._drain(batch, requests, progress_bar)
        except KeyboardInterrupt:
            self._drop(requests)
            raise

    def _drop(self, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            self.engine.abort(request.id)
        while self.engine.has_work:
            self.engine.step()

    def _drain(self, prompts: list[Prompt], requests: list[GenerationRequest], progress_bar: bool) -> list[Generation]:
        outputs: dict[str, list[Any]] = {request.id: [] for request in requests}
        done = 0
        with _bar(len(requests), progress_bar) as advance:
            while done < len(requests):
                for output in self.engine.step():
                    outputs[output.id].append(output)
                    done += output.finish_reason is not None
                    advance(len(output.tokens), output.finish_reason is not None)
        results = []
        for prompt, request in zip(prompts, requests, strict=True):
            parts = outputs[request.id]
            results.append(
                Generation(
                    prompt=prompt,
                    prompt_tokens=request.prompt,
                    tokens=tuple(token for part in parts for token in part.tokens),
                    text="".join(part.text for part in parts),
                    logprobs=tuple(logprob for part in parts for logprob in part.logprobs),
                    finish_reason=parts[-1].finish_reason,
                    stop_reason=parts[-1].stop_reason,
                    prompt_logprobs=parts[0].prompt_logprobs,
                )
            )
        return results

    def switch(self, layout: str, method: str = "auto", *, rebalance: bool = False) -> SwitchRecord:
        """Change the layout, or with `rebalance` the owners, between two calls of `generate`.

        Returns:
            the record of the switch, which has ended.

        Raises:
            ConfigError: the layout or the method is unknown, or the layout cannot work here.
        """
        record = self.engine.switch(layout, method, rebalance=rebalance)
        while self.engine.switcher.active is not None:
            self.engine.step()
        return record

    def close(self) -> None:
        """End the ranks. Idempotent."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _bar:
    """A progress bar over prompts with tokens a second, or nothing."""

    def __init__(self, total: int, show: bool) -> None:
        self._total = total
        self._show = show and total > 0
        self._tokens = 0

    def __enter__(self) -> Callable[[int, bool], None]:
        if not self._show:
            return lambda tokens, finished: None
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            TextColumn("generating"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]:.0f} tokens/s"),
            TimeElapsedColumn(),
            console=Console(file=sys.stderr),
        )
        self._progress.start()
        self._task = self._progress.add_task("", total=self._total, rate=0.0)
        return self._advance

    def _advance(self, tokens: int, finished: bool) -> None:
        self._tokens += tokens
        elapsed = self._progress.tasks[self._task].elapsed or 1e-9
        self._progress.update(self._task, advance=float(finished), rate=self._tokens / elapsed)

    def __exit__(self, *_: object) -> None:
        if self._show:
            self._progress.stop()
