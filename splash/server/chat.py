"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from splash.core.errors import RequestError
from splash.engine.outputs import GenerationRequest
from splash.engine.tokenizer import Tokenizer
from splash.server.logprobs import chat_logprobs
from splash.server.requests import (
    Service,
    answer,
    check_prompt,
    collect,
    fan_out,
    new_id,
    output_limit,
    renamed,
    stream,
    usage,
)
from splash.server.schemas import ChatCompletionRequest
from splash.server.streaming import DONE, EventStream, event, unless_client_leaves


@dataclass(frozen=True)
class _Job:
    """A checked request: what the engine is asked, and what every part of the answer says."""

    body: ChatCompletionRequest
    requests: Sequence[GenerationRequest]
    num_prompt_tokens: int
    head: dict[str, Any]


def chat_router(service: Service) -> APIRouter:
    """The route, over a service."""
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
        """Answer a conversation."""
        service.check(body.model)
        body.check()
        job = await _prepare(service, body)
        if body.stream:
            return EventStream(_events(service, job))
        return await unless_client_leaves(request.receive, _whole(service, job))

    return router


async def _prepare(service: Service, body: ChatCompletionRequest) -> _Job:
    engine = service.engine
    limit_name = "max_completion_tokens" if body.max_completion_tokens is not None else "max_tokens"
    answer_id = new_id("chatcmpl")
    try:
        prompt = await asyncio.to_thread(_encode, engine.tokenizer, body)
        check_prompt(engine, prompt, "messages")
        limit = output_limit(engine, prompt, body.token_limit, None, limit_name)
        requests = fan_out(body, answer_id, [prompt], [limit], body.num_logprobs)
    except RequestError as error:
        raise renamed(error, {"prompt": "messages", "max_tokens": limit_name}) from None
    head = {"id": answer_id, "created": int(time.time()), "model": service.settings.model}
    return _Job(body, requests, len(prompt), head)


def _encode(tokenizer: Tokenizer, body: ChatCompletionRequest) -> list[int]:
    messages = [message.for_template() for message in body.messages]
    variables = {**body.chat_template_kwargs, "add_generation_prompt": body.add_generation_prompt}
    return tokenizer.encode(tokenizer.apply_chat_template(messages, **variables), add_special_tokens=False)


async def _whole(service: Service, job: _Job) -> Response:
    choices = await collect(service.engine, job.requests)
    tokenizer = service.engine.tokenizer
    return answer(
        {
            **job.head,
            "object": "chat.completion",
            "choices": [
                {
                    "index": index,
                    "message": {"role": "assistant", "content": "".join(choice.text), "refusal": None},
                    "logprobs": chat_logprobs(tokenizer, choice.logprobs) if job.body.logprobs else None,
                    "finish_reason": choice.finish_reason,
                    "stop_reason": choice.stop_reason,
                }
                for index, choice in enumerate(choices)
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
    """For each choice a chunk with the role, one for every piece of text, one with the reason for its end."""
    tokenizer = service.engine.tokenizer
    counts, cached = [0] * len(job.requests), [0] * len(job.requests)
    begun: set[int] = set()
    head = {**job.head, "object": "chat.completion.chunk"}
    tail = {"usage": None} if job.body.include_usage else {}

    def chunk(index: int, delta: dict[str, Any], **more: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        return event({**head, "choices": [choice], **tail})

    async with aclosing(stream(service.engine, job.requests)) as outputs:
        async for index, output in outputs:
            counts[index], cached[index] = output.num_output_tokens, output.num_cached_tokens
            if index not in begun:
                begun.add(index)
                yield chunk(index, {"role": "assistant", "content": "", "refusal": None})
            if output.text or output.logprobs:
                scores = chat_logprobs(tokenizer, output.logprobs) if job.body.logprobs else None
                yield chunk(index, {"content": output.text}, logprobs=scores)
            if output.finish_reason is not None:
                yield chunk(index, {}, finish_reason=output.finish_reason, stop_reason=output.stop_reason)
    if job.body.include_usage:
        counted = usage(job.num_prompt_tokens, counts, cached, job.body.n)
        yield event({**head, "choices": [], "usage": counted})
    yield DONE
