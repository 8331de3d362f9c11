"""Images of requests, from what a client sent to pictures in a prompt."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from forebay.base.errors import InvalidRequest, Overloaded
from forebay.base.room import Room
from forebay.config.media import MediaOptions
from forebay.http.lifecycle import ClientGone
from forebay.http.preparation import Client, Preparation
from forebay.server.images.decoding import CutImage, ImageDecoder
from forebay.server.images.expansion import Expanded, Expansion
from forebay.server.images.fetching import Fetcher
from forebay.server.images.sources import Unreadable, is_data
from forebay.server.images.tiling import Tiling
from forebay.server.protocol.images import Source
from forebay.text.tokenizer import Tokenizer

ROOM_BYTES: Final = 512 << 20  # for the files and pixels of all images that have not reached the engine; see `Room`
NUM_FETCHES: Final = 64  # at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """An image that a request asks about. `place` is the field that has it."""

    source: Source
    place: str
    splits: bool


class ImageReader:
    """Reads the images of requests. Belongs to one event loop."""

    def __init__(
        self,
        tiling: Tiling,
        tokenizer: Tokenizer,
        options: MediaOptions,
        preparation: Preparation,
        *,
        fetcher: Fetcher | None = None,
    ) -> None:
        """Raises ModelError for a tokenizer that is not the model's."""
        self._max_images, self._max_bytes = options.limit_mm_per_prompt, options.max_image_bytes
        self._expansion = Expansion(tokenizer, tiling)
        self._decoder = ImageDecoder(preparation, tiling, options.max_image_bytes)
        self._fetcher = fetcher or Fetcher(options.allowed_media_domains, options.max_image_bytes)
        self._fetching = preparation.lane("download", NUM_FETCHES)
        self._room = Room(preparation.weights)

    @contextlib.contextmanager
    def admitted(self, client: Client, asked: Sequence[Asked]) -> Iterator[AdmittedImages]:
        """Inside, the images have room. Raises InvalidRequest for more images than a prompt may have, and Overloaded if
        others take the room and those of this tenant its share."""
        if len(asked) > self._max_images:
            raise InvalidRequest(
                f"the prompt has {len(asked)} images; at most {self._max_images} are taken (--limit-mm-per-prompt): "
                "send fewer",
                code="too_many_images",
                param=asked[self._max_images].place,
            )
        images = AdmittedImages(self, client, asked)
        try:
            images.hold(sum(len(image.source.text) for image in asked))
            yield images
        finally:
            self._room.leave(client.tenant, images.held)

    def close(self) -> None:
        """End the threads once their current work is done."""
        self._decoder.close()


class AdmittedImages:
    """Images of one prompt, which have room. Made by `ImageReader.admitted`."""

    def __init__(self, reader: ImageReader, client: Client, asked: Sequence[Asked]) -> None:
        self._reader, self._client, self._asked = reader, client, asked
        self.held = 0  # bytes

    def hold(self, num_bytes: int) -> None:
        """Reserve more memory, until the images are in the engine. Raises Overloaded if the limit would be exceeded."""
        room, tenant = self._reader._room, self._client.tenant
        if not room.has_room(tenant, ROOM_BYTES, num_bytes):  # no number of other tenants' is told (C29)
            raise Overloaded(f"images of requests take the {ROOM_BYTES} bytes that all may have: try again later")
        room.enter(tenant, num_bytes)
        self.held += num_bytes

    async def expanded(self, token_ids: Sequence[int], resume_points: Sequence[int]) -> Expanded:
        """Read the images and put them into the prompt, which has a placeholder for each. Raises InvalidRequest for an
        unreadable image, and Overloaded."""
        files = await self._files()
        images = [await self._image(i, file) for i, file in enumerate(files)]
        return self._reader._expansion.expand(token_ids, resume_points, images)

    async def _files(self) -> list[str | bytes]:
        """All that are elsewhere at once: each may take seconds."""
        tasks = [asyncio.ensure_future(self._file(i)) for i in range(len(self._asked))]

        def cancel() -> None:
            for task in tasks:
                task.cancel()

        watch = self._client.watch
        try:
            with watch.calling(cancel):
                return list(await asyncio.gather(*tasks))
        except asyncio.CancelledError:
            if watch.gone:
                raise ClientGone from None
            raise
        finally:
            cancel()

    async def _file(self, number: int) -> str | bytes:
        url = self._asked[number].source.take()
        if is_data(url):
            return url
        turn = await self._reader._fetching.turn(self._client)
        try:
            with self._naming(number):
                return await self._reader._fetcher.fetch(url, self.hold)
        finally:
            turn.end()

    async def _image(self, number: int, file: str | bytes) -> CutImage:
        with self._naming(number):
            image = await self._reader._decoder.decode(self._client, file, splits=self._asked[number].splits)
        self.hold(len(image.tiles.pixels))
        return image

    @contextlib.contextmanager
    def _naming(self, number: int) -> Iterator[None]:
        try:
            yield
        except Unreadable as error:
            which = f"image {number + 1} of {len(self._asked)}" if len(self._asked) > 1 else "the image"
            raise InvalidRequest(f"{which} {error}", code="invalid_image", param=self._asked[number].place) from error
