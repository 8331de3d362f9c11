"""OpenVINO GenAI's ContinuousBatchingPipeline behind `completions.serve`: `openvino_server.py MODEL --port N`, of a
folder or a GGUF file.

Runs in the peer's own environment. Its KV cache grows as it is needed, prefixes are cached, prompts are split.
"""

from __future__ import annotations

import argparse
import functools
import os
import queue
from typing import Any

import numpy as np
import openvino
import openvino_genai
from completions import END, Deliver, Request, in_thread, serve


class OpenVino:
    def __init__(self, folder: str, precision: str, deliver: Deliver) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 0  # grows
        scheduler.max_num_seqs = 256
        scheduler.max_num_batched_tokens = 2048
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = True
        properties = {
            "INFERENCE_NUM_THREADS": len(os.sched_getaffinity(0)),
            "INFERENCE_PRECISION_HINT": precision,
        }
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties)
        self._tokenizer = self._pipeline.get_tokenizer()
        self._deliver = deliver
        self._waiting: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self.text = functools.lru_cache(maxsize=None)(self._text)
        in_thread(self._run)

    def submit(self, request: Request) -> None:
        self._waiting.put(request)

    def ids(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer.encode(text).input_ids.data[0]]

    def _text(self, token: int) -> str:
        return str(self._tokenizer.decode([token]))

    def _run(self) -> None:
        running: list[tuple[Request, Any]] = []
        num_requests = 0
        while True:
            while not running or not self._waiting.empty():
                request = self._waiting.get()
                running.append((request, self._start(num_requests, request)))
                num_requests += 1
            self._pipeline.step()
            step = [(request, new_tokens(handle), is_over(handle)) for request, handle in running]
            self._deliver([(request, [*tokens, *([END] if over else [])]) for request, tokens, over in step])
            running = [pair for pair, (_, _, over) in zip(running, step, strict=True) if not over]

    def _start(self, number: int, request: Request) -> Any:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = request.max_tokens
        config.ignore_eos = request.ignore_eos
        config.do_sample = False
        ids = openvino.Tensor(np.asarray([request.prompt], dtype=np.int64))
        return self._pipeline.add_request(number, ids, config)


def new_tokens(handle: Any) -> list[int]:
    tokens: list[int] = []
    while handle.can_read():
        tokens += [token for output in handle.read().values() for token in output.generated_ids]
    return tokens


def is_over(handle: Any) -> bool:
    return bool(handle.get_status() != openvino_genai.GenerationStatus.RUNNING)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--precision", choices=["bf16", "f32"], default="bf16", help="of activations")
    arguments = parser.parse_args()
    engine = functools.partial(OpenVino, arguments.folder, arguments.precision)
    serve(engine, port=arguments.port, model="openvino")


if __name__ == "__main__":
    main()
