"""Images of chats: from the parts of messages to the pictures of a prompt."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

from forebay.base.errors import Unavailable
from forebay.engine.client.choice import Prompt
from forebay.server.api.prompts import render
from forebay.server.context import RequestContext, ServerContext
from forebay.server.images.reader import AdmittedImages, Asked
from forebay.server.protocol.messages import ChatMessage, Templated


class ChatImages:
    """The images of one chat; None of them where it has none. Made by `images_of`."""

    def __init__(self, admitted: AdmittedImages | None = None) -> None:
        self._admitted = admitted

    async def put_into(self, prompt: Prompt) -> Prompt:
        """Return the prompt with its images, each where the chat template has written a placeholder. Raises what
        `AdmittedImages.expanded` raises."""
        if self._admitted is None:
            return prompt
        found = await self._admitted.expanded(prompt.token_ids, prompt.resume_points)
        return replace(
            prompt,
            token_ids=found.token_ids,
            resume_points=found.resume_points,
            pictures=found.pictures,
            num_image_tokens=sum(picture.num_tokens for picture in found.pictures),
        )


@contextlib.contextmanager
def images_of(server: ServerContext, context: RequestContext, messages: Sequence[ChatMessage]) -> Iterator[ChatImages]:
    """Inside, the images of these messages have room. Raises what `ImageReader.admitted` raises."""
    asked = [
        Asked(
            source=part.image_url.url,
            place=f"messages.{number}.content.{place}",
            splits=part.image_url.detail != "low",
        )
        for number, message in enumerate(messages)
        for place, part in message.images.items()
    ]
    if not asked:
        yield ChatImages()
        return
    if server.images is None:  # bodies with images are refused
        raise Unavailable("this server has nothing that reads images")
    with server.images.admitted(asked, disaggregated=bool(context.sender.bootstrap)) as admitted:
        yield ChatImages(admitted)


async def chat_ids(
    server: ServerContext, context: RequestContext, messages: Sequence[ChatMessage], body: Templated
) -> list[int]:
    """Return the tokens of a conversation, with those of its images. Raises what `render` and `images_of` raise."""
    with images_of(server, context, messages) as images:
        prompt = Prompt(token_ids=await render(server, server.tokenizer.encode_chat, messages, body))
        return (await images.put_into(prompt)).token_ids
