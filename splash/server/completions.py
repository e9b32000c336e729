"""POST /v1/completions."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from splash.engine.outputs import GenerationRequest, RequestOutput
from splash.server.answers import Completion, documented
from splash.server.errors import ERRORS
from splash.server.logprobs import CompletionLogprobs
from splash.server.requests import (
    Choice,
    Service,
    answer,
    check_prompt,
    collect,
    fan_out,
    new_id,
    opened,
    output_limit,
    usage,
)
from splash.server.schemas import DEFAULT_COMPLETION_TOKENS, CompletionRequest
from splash.server.streaming import DONE, EventStream, event, event_of_text, unless_client_leaves


@dataclass(frozen=True)
class _Job:
    """A checked request: what the engine is asked, and what every part of the answer says."""

    body: CompletionRequest
    requests: Sequence[GenerationRequest]
    echoes: Sequence[str]  # for each choice, the text that goes before its own
    num_prompt_tokens: int
    head: dict[str, Any]

    def logprobs(
        self, index: int, scores: CompletionLogprobs, output: Choice | RequestOutput
    ) -> dict[str, list[Any]] | None:
        """Log-probabilities of what an output brings for a choice, those of the prompt before its first token."""
        if self.body.logprobs is None:
            return None
        prompt = self.requests[index].prompt
        if not self.body.echo or not output.num_output_tokens or output.num_output_tokens > len(output.logprobs):
            return scores.take(output.logprobs)
        before = scores.take_prompt(prompt, self.echoes[index], output.prompt_logprobs)
        after = scores.take(output.logprobs)
        return {name: values + after[name] for name, values in before.items()}


def completions_router(service: Service) -> APIRouter:
    """The route, over a service."""
    router = APIRouter(responses=ERRORS)

    @router.post("/v1/completions", responses=documented(Completion, streams=True))
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        """Continue one prompt or several."""
        service.check(body.model)
        body.check()
        job = await _prepare(service, body, service.trace(request.headers))
        if body.stream:
            return EventStream(_events(service, job))
        return await unless_client_leaves(request.receive, _whole(service, job))

    return router


async def _prepare(service: Service, body: CompletionRequest, trace: Mapping[str, str]) -> _Job:
    engine, tokenizer = service.engine, service.engine.tokenizer
    prompts: list[list[int]] = []
    echoes: list[str] = []
    limits: list[int] = []
    for prompt in body.prompts():
        text = prompt if isinstance(prompt, str) else None
        tokens = prompt if isinstance(prompt, list) else None
        if tokens is None:
            tokens = await asyncio.to_thread(tokenizer.encode, text or "", body.add_special_tokens)
        check_prompt(engine, tokens, "prompt")
        limits.append(output_limit(engine, tokens, body.max_tokens, DEFAULT_COMPLETION_TOKENS, "max_tokens"))
        prompts.append(tokens)
        if body.echo and text is None:
            text = tokenizer.decode(tokens, skip_special_tokens=False)
        echoes += [text or "" if body.echo else ""] * body.n
    grammar = None if body.structured_outputs is None else await asyncio.to_thread(body.structured_outputs.grammar)
    answer_id = new_id("cmpl")
    head = {"id": answer_id, "object": "text_completion", "created": int(time.time()), "model": service.settings.model}
    scored = body.logprobs if body.echo else None
    longest_s = service.settings.request_timeout_s
    requests = fan_out(
        body,
        answer_id,
        prompts,
        limits,
        body.logprobs,
        grammar,
        prompt_logprobs=scored,
        longest_s=longest_s,
        trace=trace,
    )
    return _Job(body, requests, echoes, sum(map(len, prompts)), head)


async def _whole(service: Service, job: _Job) -> Response:
    choices = await collect(service, job.requests)
    return answer(
        {
            **job.head,
            "choices": [
                {
                    "index": index,
                    "text": echo + "".join(choice.text),
                    "logprobs": job.logprobs(index, CompletionLogprobs(service.engine.tokenizer), choice),
                    "finish_reason": choice.finish_reason,
                    "stop_reason": choice.stop_reason,
                }
                for index, (choice, echo) in enumerate(zip(choices, job.echoes, strict=True))
            ],
            "usage": usage(
                job.num_prompt_tokens,
                [choice.num_output_tokens for choice in choices],
                [choice.num_cached_tokens for choice in choices],
                job.body.n,
            ),
        }
    )


async def _events(service: Service, job: _Job) -> AsyncGenerator[bytes, None]:
    """A chunk for every piece of text, one with the reason for each choice's end, then the token counts.

    What a step brings for all choices comes together.
    """
    echoes = list(job.echoes)
    counts, cached = [0] * len(job.requests), [0] * len(job.requests)
    logprobs = [CompletionLogprobs(service.engine.tokenizer) for _ in job.requests]
    tail = {"usage": None} if job.body.include_usage else {}

    def chunk(
        index: int, text: str, scores: object = None, finish: str | None = None, reason: str | int | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, "text": text, "logprobs": scores, "finish_reason": finish, "stop_reason": reason}
        return {**job.head, "choices": [choice], **tail}

    plain = [event_of_text(functools.partial(chunk, index)) for index in range(len(job.requests))]
    with opened(service, job.requests) as stream:
        while outputs := await stream.take():
            events = []
            for index, output in outputs:
                counts[index], cached[index] = output.num_output_tokens, output.num_cached_tokens
                text, echoes[index] = echoes[index] + output.text, ""
                if output.logprobs:
                    events.append(event(chunk(index, text, job.logprobs(index, logprobs[index], output))))
                elif text:
                    events.append(plain[index](text))
                if output.finish_reason is not None:
                    events.append(event(chunk(index, "", None, output.finish_reason, output.stop_reason)))
            if events:
                yield b"".join(events)
    if job.body.include_usage:
        counted = usage(job.num_prompt_tokens, counts, cached, job.body.n)
        yield event({**job.head, "choices": [], "usage": counted})
    yield DONE
