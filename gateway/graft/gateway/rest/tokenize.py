"""POST /tokenize and /detokenize, also under /v1."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from graft.common.errors import InvalidArgument
from graft.gateway.chat_request import DetokenizeRequest, TokenizeRequest
from graft.gateway.request import token_ids
from graft.gateway.rest.context import gateway_of

router = APIRouter(tags=["tokenize"])


@router.post("/tokenize")
@router.post("/v1/tokenize")
async def tokenize(body: TokenizeRequest, request: Request) -> dict[str, Any]:
    """Ids of a prompt, or of a conversation as the chat template renders it."""
    gateway = gateway_of(request)
    gateway.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidArgument("expected either prompt or messages", field="prompt")
    if body.messages is not None:
        tokens = await gateway.preparer.chat_tokens(body.messages)
    else:
        tokens = await gateway.preparer.text_tokens(
            body.prompt or "", specials=body.add_special_tokens
        )
    return {
        "tokens": tokens,
        "count": len(tokens),
        "max_model_len": gateway.target().context_length,
    }


@router.post("/detokenize")
@router.post("/v1/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> dict[str, Any]:
    """The text of token ids."""
    gateway = gateway_of(request)
    gateway.check_model(body.model)
    token_ids("tokens", body.tokens, gateway.target().vocab_size)
    return {"prompt": gateway.tokenizer.decode(body.tokens)}
