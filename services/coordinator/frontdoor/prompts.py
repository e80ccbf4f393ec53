"""What a request asks for, as far as placing it needs to know (pure)."""

from array import array
from dataclasses import dataclass
from typing import Any

import orjson

from services.runtime.bounded_bodies import TooComplexError, check_json

COMPLETIONS, CHAT, TOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize"

# What vLLM's /tokenize takes beside the messages; it must see them, or it renders another prompt than the engine.
_TEMPLATE_FIELDS = (
    *("tools", "chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"),
    *("add_special_tokens", "mm_processor_kwargs"),
)
_TEXT_PARTS = ("text", "input_text", "refusal")


class RequestRefusedError(ValueError):
    """A request that no engine would take; the text names the field."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """model; tokens: little-endian u32, None when they must be asked for with the body `to_tokenize`.

    without_prefix: why nothing can be known about the prefix ("" when it can).
    """

    model: str
    tokens: bytes | None = None
    to_tokenize: dict[str, Any] | None = None
    cache_salt: str | None = None
    without_prefix: str = ""


def read_prompt(body: bytes, path: str) -> Prompt:
    """Read the body of a request to one of the front door's paths. Raises RequestRefusedError."""
    try:
        check_json(body)
        fields = orjson.loads(body)
    except TooComplexError as error:
        raise RequestRefusedError(f"the body is too complex: {error}") from None
    except orjson.JSONDecodeError as error:
        raise RequestRefusedError(f"the body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise RequestRefusedError("the body must be a JSON object")
    model = fields.get("model")
    if not isinstance(model, str) or not model:
        raise RequestRefusedError("model is missing: name one of /v1/models")
    salt = fields.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise RequestRefusedError("cache_salt must be text that is not empty")
    if path == TOKENIZE:
        return Prompt(model, without_prefix="not_needed")
    return _chat(fields, model, salt) if path == CHAT else _completion(fields, model, salt)


def _completion(fields: dict[str, Any], model: str, salt: str | None) -> Prompt:
    prompt = fields.get("prompt")
    if fields.get("prompt_embeds") is not None and not prompt:
        return Prompt(model, cache_salt=salt, without_prefix="embeddings")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]  # several prompts go together; the first one decides where
    if isinstance(prompt, str) and prompt:
        body = {"model": model, "prompt": prompt}
        if isinstance(fields.get("add_special_tokens"), bool):
            body["add_special_tokens"] = fields["add_special_tokens"]
        return Prompt(model, to_tokenize=body, cache_salt=salt)
    if isinstance(prompt, list) and prompt:
        try:
            return Prompt(model, tokens=array("I", prompt).tobytes(), cache_salt=salt)
        except (TypeError, OverflowError):
            raise RequestRefusedError("prompt must be text or token ids from 0 to 4294967295") from None
    raise RequestRefusedError("prompt is missing: send text or a list of token ids")


def _chat(fields: dict[str, Any], model: str, salt: str | None) -> Prompt:
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise RequestRefusedError("messages must be a list of objects that is not empty")
    if any(_has_media(message.get("content")) for message in messages):
        # The engine folds image hashes into its blocks; tokens alone would match other images.
        return Prompt(model, cache_salt=salt, without_prefix="multimodal")
    body = {"model": model, "messages": messages}
    body.update((name, fields[name]) for name in _TEMPLATE_FIELDS if fields.get(name) is not None)
    return Prompt(model, to_tokenize=body, cache_salt=salt)


def _has_media(content: object) -> bool:
    if not isinstance(content, list):
        return False
    return any(isinstance(part, dict) and part.get("type", "text") not in _TEXT_PARTS for part in content)
