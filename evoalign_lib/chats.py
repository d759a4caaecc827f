"""Conversations as texts: what a chat template is given, and where the model's completion begins."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

DATE = datetime(2024, 7, 26)
"""The date that a template states instead of today's: that of Llama 3's templates where they have no clock."""

OWN = {"tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"}
"""Arguments of apply_chat_template that are no settings of a template."""


Messages = Sequence[Mapping[str, Any]]
Clock = Callable[[str], str]
"""Formats a date as datetime.strftime does."""


def rendered(tokenizer: Any, messages: Messages, clock: Clock = DATE.strftime, **settings: Any) -> str:
    """Render messages by a tokenizer's chat template, with a fixed date if it states one, so that no day matters.

    clock: what the template asks for the date; settings: further arguments of apply_chat_template.
    """
    template = settings.get("chat_template") or getattr(tokenizer, "chat_template", None)
    if "strftime_now" in str(template):  # others may refuse an argument that they do not know
        settings = {"strftime_now": clock} | settings
    return tokenizer.apply_chat_template(messages, tokenize=False, **settings)


def opened(tokenizer: Any, messages: Sequence[Mapping[str, Any]], clock: Clock = DATE.strftime, **settings: Any) -> str:
    """Render messages up to where a completion begins: if the last one is the assistant's, it is continued, as in TRL.

    clock: what the template asks for the date; settings: further arguments of apply_chat_template.

    Raises:
        ValueError: messages that `plain` refuses, or one that the template leaves out.
    """
    messages = plain(messages)
    by_role = messages[-1]["role"] == "assistant" and not settings.get("add_generation_prompt")
    continued = settings.get("continue_final_message", by_role)
    settings = {"add_generation_prompt": not continued, "continue_final_message": continued} | settings
    text = rendered(tokenizer, messages, clock, **settings)
    said = [message.get("content", "").strip() if message["role"] != "tool" else "" for message in messages]
    for i, content in enumerate(said):  # of tools, who may answer with JSON, templates read what they will
        # a short one may stand anywhere, a long one in another message
        if not content or len(content) > 20 and text.count(content) >= "\n".join(said).count(content):
            continue
        other = [*messages[:i], messages[i] | {"content": messages[i]["content"] + "x"}, *messages[i + 1 :]]
        if rendered(tokenizer, other, clock, **settings) == text:
            remedy = "change its role, empty its content (beside tool calls), or change the template"
            raise ValueError(f"the template leaves out what message {i} says, {messages[i]!r:.200}: {remedy}")
    return text


def plain(messages: Messages) -> list[dict[str, Any]]:
    """Return messages as templates read them: without the None that Arrow fills in, and with texts in parts joined.

    Raises:
        ValueError: no messages, or one without a role, or whose content is not text.

    >>> plain([{"role": "user", "content": [{"type": "text", "text": "2+2"}], "tool_calls": None}])
    [{'role': 'user', 'content': '2+2'}]
    """
    if not messages:
        raise ValueError("there are no messages")
    found = [_without_none(message) for message in messages]
    for i, message in enumerate(found):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            remedy = "pass {'role': 'user', 'content': ...} (trl.maybe_convert_to_chatml renames 'from' and 'value')"
            raise ValueError(f"message {i}, {message!r:.200}, has no role: {remedy}")
        content = message.get("content", "" if "tool_calls" in message else None)
        if content and isinstance(content, list) and all(_is_text(part) for part in content):
            message["content"] = content = "".join(part["text"] for part in content)
        if not isinstance(content, str) and message["role"] != "tool":
            raise ValueError(f"the content of message {i}, {content!r:.200}, is not text: pass text alone")
    return found


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and "text" in part


def _without_none(value: Any) -> Any:
    """Return a value without what is None in mappings at any depth, as TRL's remove_none_values."""
    if isinstance(value, Mapping):
        return {name: _without_none(entry) for name, entry in value.items() if entry is not None}
    return [_without_none(entry) for entry in value] if isinstance(value, list) else value
