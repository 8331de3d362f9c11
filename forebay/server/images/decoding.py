"""Decoding images off the event loop and out of this process."""

from __future__ import annotations

from functools import partial
from typing import Final, NamedTuple

from forebay.base.confined import ConfinedProcess, Late, NoAnswer, Processes
from forebay.base.errors import Overloaded
from forebay.http.preparation import Client, Preparation
from forebay.http.workers import Workers
from forebay.requests.pictures import digest_of
from forebay.server.images.frames import LIMITS, Decode, Decoded, Refused, decode_answer, encode
from forebay.server.images.sources import Unreadable, check_data
from forebay.server.images.tiling import Tiling

NUM_THREADS: Final = 2  # an image that takes all the time it may does not hold up everybody else's
MAX_WAIT_S: Final = 60.0  # by the clock, for what the processor may take `LIMITS.cpu_s` for
_MODULE: Final = "forebay.server.images.worker"


class CutImage(NamedTuple):
    """Tiles of an image, and the digest of their pixels, grid and sizes."""

    tiles: Decoded
    digest: bytes


class ImageDecoder:
    """Threads that decode images, each with a process. A process that exceeds its limits is killed. Belongs to one
    event loop."""

    def __init__(self, preparation: Preparation, tiling: Tiling, max_bytes: int) -> None:
        self._tiling, self._max_bytes = tiling, max_bytes
        self._processes = Processes(partial(ConfinedProcess, _MODULE, LIMITS, "decoding images"))
        self._workers = Workers(preparation.lane("image", NUM_THREADS))

    async def decode(self, client: Client, file: str | bytes, *, splits: bool) -> CutImage:
        """Decode a file, or the one in a `data:` URL. Raises Unreadable, Overloaded where that could not be found
        out, and what `Workers.run` raises."""
        return await self._workers.run(client, partial(self._decode, file, splits))

    def _decode(self, file: str | bytes, splits: bool) -> CutImage:
        content, url = (b"", file) if isinstance(file, str) else (file, "")
        if url:
            check_data(url, self._max_bytes)
        question = encode(Decode(content, url, self._max_bytes, self._tiling, splits))
        try:
            with self._processes.one() as process:
                answer = decode_answer(process.exchange(question, MAX_WAIT_S))
        except Late as error:
            raise Overloaded(f"decoding an image {error}: the server is busy, try again later") from error
        except NoAnswer as error:
            raise Unreadable(f"{error} while it was decoded: send a smaller one") from error
        if isinstance(answer, Refused):
            raise Unreadable(answer.why)
        return CutImage(answer, digest_of(answer.pixels, answer.grid, answer.sizes))

    def close(self) -> None:
        """End the threads once their current work is done."""
        self._workers.close()
