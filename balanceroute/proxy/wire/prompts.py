"""Takes the prompts out of a client's body, sizes them, and splits batches.

A prompt is kept as JSON, because a list of token ids is several times larger in Python. Its size in tokens is exact for
token ids; for text it is estimated as one token per 4 bytes.
"""

from typing import Any, Final

import orjson

from balanceroute.errors import InvalidRequest
from balanceroute.proxy.wire.fields import as_integers
from balanceroute.proxy.wire.json_body import as_json

MAX_PROMPTS: Final = 2**16  # as many choices as `limits.max_choices` may allow
_EMBEDDING_BYTES: Final = 4096  # bytes of one token's embedding: some KiB


def take_prompt(data: dict[str, Any]) -> tuple[bytes, int, int]:
    """Remove the prompt of a completion from `data`.

    Returns: the prompt as JSON (empty: embeddings stand for it, and stay in `data`), its tokens, and the number of
    prompts. Raises: InvalidRequest.
    """
    prompt = data.pop("prompt", None)
    if embeds := data.pop("prompt_embeds", None):
        data["prompt_embeds"] = embeds
        return b"", *_sizes_of_embeds(embeds, prompt)
    if prompt is None or prompt == [] or prompt == "":
        raise InvalidRequest("Either prompt or prompt_embeds must be provided and non-empty.", param="prompt")
    if isinstance(prompt, bytes):  # of `json_body.load_prompt`
        return prompt, prompt.count(b",") + 1, 1
    if _is_batch(prompt):
        if len(prompt) > MAX_PROMPTS:  # before they are looked at: a quarter of a million lists take half a second
            raise InvalidRequest(f"At most {MAX_PROMPTS} prompts per request, not {len(prompt)}.", param="prompt")
        if not all(map(_is_one_prompt, prompt)):
            prompt = [_as_ids(part) for part in prompt]
            if not all(map(_is_one_prompt, prompt)):
                raise InvalidRequest("Each prompt must be a string or a list of token ids.", param="prompt")
        if len(prompt) == 1 and prompt[0]:  # an empty text is a prompt in a list only
            return as_json(prompt[0]), _prompt_tokens(prompt[0]), 1
        return as_json(prompt), sum(map(_prompt_tokens, prompt)), len(prompt)
    if not _is_one_prompt(prompt):
        prompt = _as_ids(prompt)
        if not _is_one_prompt(prompt):
            raise InvalidRequest("prompt must be a string, a list of token ids, or a list of either.", param="prompt")
    return as_json(prompt), _prompt_tokens(prompt), 1


def take_messages(data: dict[str, Any]) -> tuple[bytes, int, int]:
    """Remove the messages of a chat from `data`.

    Returns: the messages as JSON, their tokens, and their number. Raises: InvalidRequest.
    """
    messages = data.pop("messages", None)
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages must be a non-empty list.", param="messages")
    text_bytes = 0
    for message in messages:
        if not isinstance(message, dict):
            raise InvalidRequest("Each message must be an object.", param="messages")
        text_bytes += _text_bytes(message.get("content"))
    return as_json(messages), text_bytes // 4 + 4 * len(messages), len(messages)


def _sizes_of_embeds(embeds: object, prompt: object) -> tuple[int, int]:
    """The approximate tokens of `prompt_embeds`, and the number of prompts.

    `prompt`, the field beside them, must be empty; OpenAI's clients send "". Raises: InvalidRequest.
    """
    if prompt not in (None, "", []):
        raise InvalidRequest("prompt and prompt_embeds cannot be served in one request.", param="prompt_embeds")
    parts = embeds if isinstance(embeds, list) else [embeds]
    if not all(isinstance(part, str) and part for part in parts):
        raise InvalidRequest("prompt_embeds must be a string or a list of strings.", param="prompt_embeds")
    return sum(map(len, parts)) // _EMBEDDING_BYTES, len(parts)


def batch_of(prompt_json: bytes) -> list[tuple[bytes, int]]:
    """The prompts of a batch, each as JSON and with its tokens; empty: a single prompt."""
    prompts = orjson.loads(prompt_json)
    if not _is_batch(prompts):
        return []
    # an empty text is a prompt in a list only
    return [(as_json(prompt or [prompt]), _prompt_tokens(prompt)) for prompt in prompts]


def embeds_tokens(embeds: str) -> int:
    """The approximate tokens of one prompt of embeddings."""
    return len(embeds) // _EMBEDDING_BYTES


def _text_bytes(content: object) -> int:
    if isinstance(content, str):
        return len(content) if content.isascii() else len(content.encode("utf-8", "replace"))
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        return sum(_text_bytes(text) for text in texts if isinstance(text, str))
    return 0


def _is_batch(prompt: object) -> bool:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], (str, list))


def _is_one_prompt(prompt: object) -> bool:
    if isinstance(prompt, str):
        return True
    return isinstance(prompt, list) and bool(prompt) and set(map(type, prompt)) == {int}


def _as_ids(prompt: Any) -> Any:
    """A list of numbers as token ids, as engines read them (5.0 is 5); any other value unchanged."""
    if not isinstance(prompt, list) or not {int, float}.issuperset(map(type, prompt)):
        return prompt
    ids = as_integers(prompt)
    return prompt if ids is None else ids


def _prompt_tokens(prompt: str | list[int]) -> int:
    return _text_bytes(prompt) // 4 if isinstance(prompt, str) else len(prompt)
