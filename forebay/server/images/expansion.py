"""The tokens that represent an image in a prompt: placeholders, and around them the tokens that give the position of
each tile."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import groupby
from typing import Final, NamedTuple

from forebay.base.errors import InvalidRequest, ModelError
from forebay.base.pixels import Size
from forebay.requests.pictures import Picture
from forebay.server.images.decoding import CutImage
from forebay.server.images.tiling import Tiling
from forebay.server.images.tilings.base import ONE_TILE
from forebay.text.tokenizer import ImageText, Tokenizer

MOST_CUTS: Final = 128  # whose tokens are kept


class Expanded(NamedTuple):
    """A prompt with its images, and the new positions of its resumption points."""

    token_ids: list[int]
    resume_points: tuple[int, ...]
    pictures: tuple[Picture, ...]


class Expansion:
    """The tokens of images for one model, as transformers' processor of its type writes them."""

    def __init__(self, tokenizer: Tokenizer, tiling: Tiling) -> None:
        """Raises ModelError for a tokenizer whose placeholder is none, or is a text that users may write."""
        self._tokenizer, self._tiling = tokenizer, tiling
        self._image = self._spell(tiling.placeholder)
        self.of_tiles = lru_cache(MOST_CUTS)(self._of_tiles)
        as_text = tokenizer.encode(self._image, add_special_tokens=False)
        one_token = self.of_tiles(ONE_TILE, ((tiling.token_edge, tiling.token_edge),)).count(tiling.placeholder)
        if one_token != 1 or tiling.placeholder in as_text:
            raise ModelError(
                f"the tokenizer does not read {self._image!a} as the placeholder of images, the token "
                f"{tiling.placeholder}: take the one that the model was trained with"
            )
        frame = tiling.framed(self._spell)
        if frame is not None:
            self._check_written(frame[0])
        token, framed = frame or (self._image, self._image)
        tokenizer.image_text = ImageText(token, tiling.written(token), framed)

    def _spell(self, token: int) -> str:
        return self._tokenizer.decode([token], skip_special_tokens=False)

    def _check_written(self, written: str) -> None:
        """Raises ModelError unless it is a token, and not one that users may write."""
        encode = partial(self._tokenizer.encode, written, add_special_tokens=False)
        if len(encode(parse_special=True)) != 1 or len(encode()) == 1:
            raise ModelError(
                f"the tokenizer does not read {written!a} as the token with which templates write an image: take the "
                "one that the model was trained with"
            )

    def _of_tiles(self, grid: tuple[int, int], sizes: tuple[Size, ...]) -> list[int]:
        text = self._tiling.text_of(grid, sizes, self._image)
        return self._tokenizer.encode(text, add_special_tokens=False, parse_special=True)

    def expand(self, token_ids: Sequence[int], resume_points: Sequence[int], images: Sequence[CutImage]) -> Expanded:
        """Put each image's tokens where the chat template has written a placeholder. Raises InvalidRequest if it has
        not written one for each image."""
        places = [place for place, token in enumerate(token_ids) if token == self._tiling.placeholder]
        if len(places) != len(images):
            raise InvalidRequest(
                f"the chat template wrote {len(places)} placeholders for {len(images)} images: it may not support them "
                "where they are; send them in messages of role user, or set another one with --chat-template",
                code="chat_template_error",
                param="messages",
            )
        ids: list[int] = []
        pictures = []
        before = 0
        for place, image in zip(places, images, strict=True):
            ids += token_ids[before:place]
            before = place + 1
            own = self.of_tiles(image.tiles.grid, image.tiles.sizes)
            pictures.append(_picture(image, _runs(own, self._tiling.placeholder, len(ids))))
            ids += own
        ids += token_ids[before:]
        added = [len(self.of_tiles(image.tiles.grid, image.tiles.sizes)) - 1 for image in images]
        shifted = (point + sum(n for at, n in zip(places, added, strict=True) if at < point) for point in resume_points)
        return Expanded(ids, tuple(shifted), tuple(pictures))


def _runs(token_ids: list[int], placeholder: int, start: int) -> tuple[tuple[int, int], ...]:
    """The runs of placeholders, in a prompt in which the tokens begin at `start`."""
    runs = []
    for is_placeholder, run in groupby(token_ids, placeholder.__eq__):
        length = len(list(run))
        if is_placeholder:
            runs.append((start, length))
        start += length
    return tuple(runs)


def _picture(image: CutImage, runs: tuple[tuple[int, int], ...]) -> Picture:
    tiles = image.tiles
    return Picture(
        digest=image.digest,
        grid=tiles.grid,
        sizes=tiles.sizes,
        pixels=tiles.pixels,
        runs=runs,
    )
