"""Images of chats: from the parts of messages to the pictures of a prompt."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from forebay.base.errors import Unavailable
from forebay.engine.client.choice import Prompt
from forebay.server.api.core.prompts import render
from forebay.server.context import RequestContext, ServerContext
from forebay.server.images.reader import AdmittedImages, Asked
from forebay.server.protocol.messages import ChatMessage, Templated


async def with_images(
    server: ServerContext,
    context: RequestContext,
    messages: Sequence[ChatMessage],
    prompts: Callable[[], Awaitable[list[Prompt]]],
) -> list[Prompt]:
    """Return the prompts that the chat template has made of these messages, with the messages' images in the places of
    the placeholders. Raises the errors of `ImageReader.admitted` and `AdmittedImages.expanded`."""
    asked = _asked(messages)
    if not asked:
        return await prompts()
    if server.images is None:  # a body with images was refused
        raise Unavailable("this server has nothing that reads images")
    with server.images.admitted(context.client, asked) as images:
        return [await _expanded(images, prompt) for prompt in await prompts()]


def _asked(messages: Sequence[ChatMessage]) -> list[Asked]:
    return [
        Asked(
            source=part.image_url.url,
            place=f"messages.{number}.content.{place}",
            splits=part.image_url.detail != "low",
        )
        for number, message in enumerate(messages)
        for place, part in message.images.items()
    ]


async def _expanded(images: AdmittedImages, prompt: Prompt) -> Prompt:
    num_points, ends = len(prompt.resume_points), [asked.num_tokens for asked in prompt.retentions]
    found = await images.expanded(prompt.token_ids, [*prompt.resume_points, *ends])
    moved = zip(prompt.retentions, found.resume_points[num_points:], strict=True)
    return replace(
        prompt,
        token_ids=found.token_ids,
        resume_points=found.resume_points[:num_points],
        retentions=tuple(asked._replace(num_tokens=end) for asked, end in moved),
        pictures=found.pictures,
        num_image_tokens=sum(picture.num_tokens for picture in found.pictures),
    )


async def chat_ids(
    server: ServerContext, context: RequestContext, messages: Sequence[ChatMessage], body: Templated
) -> list[int]:
    """Return the tokens of a conversation, with those of its images. Raises what `render` and `with_images` raise."""

    async def prompts() -> list[Prompt]:
        return [Prompt(token_ids=await render(server, server.tokenizer.encode_chat, messages, body))]

    (prompt,) = await with_images(server, context, messages, prompts)
    return prompt.token_ids
