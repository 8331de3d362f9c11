"""A server whose engine never gives a token, in a process of its own: it prints its address."""

from __future__ import annotations

from dataclasses import replace

import uvloop

from forebay.server.serve import serve
from tests.deadlines import NEVER_S
from tests.server.fake_engine import FakeEngine
from tests.server.served import CONFIG, MODEL
from tests.text.tiny_tokenizer import tiny_tokenizer


async def _serve() -> None:
    config = replace(CONFIG, drain_timeout_s=NEVER_S)
    engine = FakeEngine(manual=True)
    await serve(config, MODEL, engine, tiny_tokenizer(600), on_ready=lambda url: print(url, flush=True))


def main() -> int:
    uvloop.run(_serve())
    return 0


if __name__ == "__main__":
    main()
