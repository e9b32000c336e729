"""POST /tokenize and POST /detokenize, as vLLM has them."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter
from pydantic import Field, model_validator
from starlette.responses import Response

from splash.core.errors import RequestError
from splash.server.answers import Text, Tokens, documented
from splash.server.chat_format import ChatFormat
from splash.server.chat_schemas import Message, ToolSpec
from splash.server.conversation import prompt_text
from splash.server.errors import ERRORS
from splash.server.requests import Service, answer, check_vocabulary, renamed
from splash.server.schemas import Model


class TokenizeRequest(Model):
    """Body of POST /tokenize: a text, or a conversation that the chat template makes one."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(default=None, min_length=1)
    tools: list[ToolSpec] = Field(default=[])
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default={})
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt or messages must be given, and not both")
        return self


class DetokenizeRequest(Model):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: list[int]


def tokenize_router(service: Service) -> APIRouter:
    """The routes, over a service."""
    router = APIRouter(responses=ERRORS)
    engine = service.engine

    @router.post("/tokenize", responses=documented(Tokens))
    async def tokenize(body: TokenizeRequest) -> Response:
        """Token ids of a text or of a conversation."""
        service.check(body.model)
        tokens = await asyncio.to_thread(_tokens, service, body)
        strings = [engine.tokenizer.backend.id_to_token(token) for token in tokens] if body.return_token_strs else None
        return answer(
            {"count": len(tokens), "max_model_len": engine.max_model_len, "tokens": tokens, "token_strs": strings}
        )

    @router.post("/detokenize", responses=documented(Text))
    async def detokenize(body: DetokenizeRequest) -> Response:
        """The text of token ids, special ones included."""
        service.check(body.model)
        check_vocabulary(engine, body.tokens, "tokens")
        text = await asyncio.to_thread(engine.tokenizer.decode, body.tokens, False)
        return answer({"prompt": text})

    return router


def _tokens(service: Service, body: TokenizeRequest) -> list[int]:
    tokenizer = service.engine.tokenizer
    if body.prompt is not None:
        return tokenizer.encode(body.prompt, body.add_special_tokens is not False)
    assert body.messages is not None
    format = ChatFormat.of(tokenizer, service.settings.tool_format)
    try:
        text = prompt_text(
            tokenizer, format, body.messages, body.tools, body.add_generation_prompt, body.chat_template_kwargs
        )
        return tokenizer.encode(text, body.add_special_tokens is True)
    except RequestError as error:
        raise renamed(error, {"prompt": "messages"}) from None
