"""Bodies of the engine's OpenAI-style HTTP interface, and the byte-level tokenizer behind it."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

ROLE_OPEN = "<|{role}|>"
ANSWER_OPEN = "<|assistant|>"

TokenIds = list[Annotated[int, Field(ge=0, le=0xFFFF_FFFF)]]


class StreamOptions(BaseModel):
    """include_usage: send a last chunk with the usage."""

    include_usage: bool = False


class _Body(BaseModel):
    model_config = ConfigDict(extra="ignore")

    model: str | None = None


class _GenerationBody(_Body):
    max_tokens: int = Field(default=16, ge=1, le=65_536)
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None


class CompletionBody(_GenerationBody):
    """POST /v1/completions: text, or token ids; a list of one prompt is taken as that prompt."""

    prompt: str | TokenIds | list[str] | list[TokenIds]


class ChatBody(_GenerationBody):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=65_536)


class TokenizeBody(_Body):
    """POST /tokenize: a prompt, or messages to be put into the chat template."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None


def tokenize(text: str) -> list[int]:
    """One token per UTF-8 byte."""
    return list(text.encode())


def detokenize(tokens: list[int]) -> str:
    """The reverse; tokens that are no byte become a replacement character."""
    return b"".join(bytes([token]) if token < 256 else "\N{REPLACEMENT CHARACTER}".encode() for token in tokens).decode(
        "utf-8", "replace"
    )


def chat_prompt(messages: list[dict[str, Any]]) -> str:
    """The chat template: every message after a marker of its role, then the assistant's marker."""
    return (
        "".join(
            ROLE_OPEN.format(role=message.get("role", "user")) + _text(message.get("content")) for message in messages
        )
        + ANSWER_OPEN
    )


def prompt_tokens(prompt: str | list[int] | list[str] | list[list[int]]) -> list[int]:
    """Token ids of a completion's prompt. Raises ValueError for several prompts or none."""
    if isinstance(prompt, str):
        return tokenize(prompt)
    if not prompt:
        raise ValueError("prompt must not be empty")
    first = prompt[0]
    if isinstance(first, int):
        return [token for token in prompt if isinstance(token, int)]
    if len(prompt) > 1:
        raise ValueError("one prompt per request, please: this engine is a simulation")
    return tokenize(first) if isinstance(first, str) else first


def _text(content: object) -> str:
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""
