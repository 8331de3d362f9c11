"""A process that starts an engine, says on its standard output what it has come to, and lives until it is killed:
`python -m tests.engine.fake_server LOAD_S STEP_S NUM_REQUESTS PROMPT_LEN [thread|drain]`."""

from __future__ import annotations

import asyncio
import sys
import threading

from forebay.engine.client.async_engine import AsyncEngine
from forebay.engine.lifecycle.launch import EngineProcess, launch
from forebay.requests.sampling_params import SamplingParams
from tests.engine.fake_engine import ENTRY, script


def start(load_s: float, step_s: float, in_thread: bool) -> EngineProcess:
    config = script(load_s, step_s)
    if not in_thread:
        return launch(config, entry=ENTRY)
    started: list[EngineProcess] = []
    thread = threading.Thread(target=lambda: started.append(launch(config, entry=ENTRY)))
    thread.start()
    thread.join()
    return started[0]


async def main(load_s: float, step_s: float, num_requests: int, prompt_len: int, mode: str) -> None:
    process = start(load_s, step_s, mode == "thread")
    print(process.pid, flush=True)
    engine = await AsyncEngine.connect(process)
    await engine.ready()
    params = SamplingParams(max_tokens=200)
    streams = [engine.submit(prompt_token_ids=[i] * prompt_len, params=params) for i in range(1, num_requests + 1)]
    if mode == "tokens":
        for stream in streams:
            await anext(stream)
    print("up", flush=True)
    await engine.close(3600.0) if mode == "drain" else await asyncio.sleep(3600)


if __name__ == "__main__":
    numbers = sys.argv[1:5]
    asyncio.run(main(float(numbers[0]), float(numbers[1]), int(numbers[2]), int(numbers[3]), (*sys.argv, "")[5]))
