"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import functools
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from splash.core.errors import RequestError
from splash.engine.outputs import GenerationRequest, RequestOutput
from splash.server.answers import ChatCompletion, documented
from splash.server.chat_format import ChatFormat, Content, Part, Reply, Thought
from splash.server.chat_schemas import ChatCompletionRequest
from splash.server.conversation import Conversation, read_conversation
from splash.server.errors import ERRORS
from splash.server.logprobs import chat_logprobs
from splash.server.requests import (
    Service,
    answer,
    check_prompt,
    collect,
    fan_out,
    new_id,
    opened,
    output_limit,
    renamed,
    usage,
)
from splash.server.streaming import DONE, EventStream, event, event_of_text, unless_client_leaves
from splash.server.tool_formats import ToolCall


@dataclass(frozen=True)
class _Job:
    """A checked request: what the engine is asked, and what every part of the answer says."""

    body: ChatCompletionRequest
    conversation: Conversation
    requests: Sequence[GenerationRequest]
    head: dict[str, Any]

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.conversation.prompt)


def chat_router(service: Service) -> APIRouter:
    """The route, over a service."""
    router = APIRouter(responses=ERRORS)

    @router.post("/v1/chat/completions", responses=documented(ChatCompletion, streams=True))
    async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
        """Answer a conversation."""
        service.check(body.model)
        body.check()
        job = await _prepare(service, body, service.trace(request.headers))
        if body.stream:
            return EventStream(_events(service, job))
        return await unless_client_leaves(request.receive, _whole(service, job))

    return router


async def _prepare(service: Service, body: ChatCompletionRequest, trace: Mapping[str, str]) -> _Job:
    engine = service.engine
    limit_name = "max_completion_tokens" if body.max_completion_tokens is not None else "max_tokens"
    answer_id = new_id("chatcmpl")
    format = ChatFormat.of(engine.tokenizer, service.settings.tool_format)
    try:
        conversation = await asyncio.to_thread(read_conversation, engine.tokenizer, format, body)
        prompt = conversation.prompt
        check_prompt(engine, prompt, "messages")
        limit = output_limit(engine, prompt, body.token_limit, None, limit_name)
        requests = fan_out(
            body,
            answer_id,
            [prompt],
            [limit],
            body.num_logprobs,
            conversation.grammar,
            format.visible,
            longest_s=service.settings.request_timeout_s,
            trace=trace,
        )
    except RequestError as error:
        raise renamed(error, {"prompt": "messages", "max_tokens": limit_name}) from None
    head = {"id": answer_id, "created": int(time.time()), "model": service.settings.model}
    return _Job(body, conversation, requests, head)


def _call(call: ToolCall) -> dict[str, Any]:
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _message(parts: Sequence[Part]) -> dict[str, Any]:
    """A whole answer as the API gives it."""
    content = "".join(part.text for part in parts if isinstance(part, Content))
    thoughts = "".join(part.text for part in parts if isinstance(part, Thought))
    calls = [_call(part) for part in parts if isinstance(part, ToolCall)]
    message = {"role": "assistant", "content": None if calls and not content else content, "refusal": None}
    return message | ({"reasoning_content": thoughts} if thoughts else {}) | ({"tool_calls": calls} if calls else {})


def _finish_reason(reason: str | None, reply: Reply) -> str | None:
    return "tool_calls" if reason == "stop" and reply.num_calls else reason


async def _whole(service: Service, job: _Job) -> Response:
    choices = await collect(service, job.requests)
    tokenizer = service.engine.tokenizer
    answers = []
    for index, choice in enumerate(choices):
        reply = job.conversation.reply()
        parts = reply.push("".join(choice.text)) + reply.finish()
        answers.append(
            {
                "index": index,
                "message": _message(parts),
                "logprobs": chat_logprobs(tokenizer, choice.logprobs) if job.body.logprobs else None,
                "finish_reason": _finish_reason(choice.finish_reason, reply),
                "stop_reason": choice.stop_reason,
            }
        )
    counted = usage(
        job.num_prompt_tokens,
        [choice.num_output_tokens for choice in choices],
        [choice.num_cached_tokens for choice in choices],
        job.body.n,
    )
    return answer({**job.head, "object": "chat.completion", "choices": answers, "usage": counted})


async def _events(service: Service, job: _Job) -> AsyncGenerator[bytes, None]:
    """For each choice a chunk with the role, one for every part of the answer, one with the reason for its end."""
    tokenizer = service.engine.tokenizer
    counts, cached = [0] * len(job.requests), [0] * len(job.requests)
    replies = [job.conversation.reply() for _ in job.requests]
    calls = [0] * len(job.requests)  # answered so far
    begun: set[int] = set()
    head = {**job.head, "object": "chat.completion.chunk"}
    tail = {"usage": None} if job.body.include_usage else {}

    def chunk(index: int, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        return {**head, "choices": [choice], **tail}

    def delta(index: int, part: Part) -> dict[str, Any]:
        if isinstance(part, ToolCall):
            calls[index] += 1
            return {"tool_calls": [{"index": calls[index] - 1, **_call(part)}]}
        return {"reasoning_content" if isinstance(part, Thought) else "content": part.text}

    def parts_of(index: int, output: RequestOutput) -> Iterator[bytes]:
        parts = replies[index].push(output.text)
        if output.finish_reason is not None:
            parts += replies[index].finish()
        if job.body.logprobs and output.logprobs:
            scores = chat_logprobs(tokenizer, output.logprobs)
            first, *others = [delta(index, part) for part in parts] or [{"content": ""}]
            yield event(chunk(index, first, logprobs=scores))
            yield from (event(chunk(index, other)) for other in others)
            return
        for part in parts:
            yield plain[index](part.text) if isinstance(part, Content) else event(chunk(index, delta(index, part)))

    def content(index: int, text: str) -> dict[str, Any]:
        return chunk(index, {"content": text})

    plain = [event_of_text(functools.partial(content, index)) for index in range(len(job.requests))]
    with opened(service, job.requests) as stream:
        while outputs := await stream.take():
            events = []
            for index, output in outputs:
                counts[index], cached[index] = output.num_output_tokens, output.num_cached_tokens
                if index not in begun:
                    begun.add(index)
                    events.append(event(chunk(index, {"role": "assistant", "content": "", "refusal": None})))
                events += parts_of(index, output)
                if output.finish_reason is not None:
                    reason = _finish_reason(output.finish_reason, replies[index])
                    events.append(event(chunk(index, {}, finish_reason=reason, stop_reason=output.stop_reason)))
            if events:
                yield b"".join(events)
    if job.body.include_usage:
        counted = usage(job.num_prompt_tokens, counts, cached, job.body.n)
        yield event({**head, "choices": [], "usage": counted})
    yield DONE
