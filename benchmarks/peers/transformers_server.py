"""transformers' `generate` behind `completions.serve`: `transformers_server.py FOLDER --port N`.

Runs in the peer's own environment: bfloat16, SDPA, all cores. `generate` takes a batch and lets none join it, so what
waits when a batch ends is the next one, padded on the left where lengths differ.
"""

from __future__ import annotations

import argparse
import functools
import os
import queue
import time

import torch
from completions import END, Deliver, Request, in_thread, serve
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer

# Requests that are sent at once arrive one after the other: a batch is closed this long after its first.
GATHER_S = 0.01
MAX_BATCH = 64


class Transformers:
    def __init__(self, folder: str, deliver: Deliver) -> None:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        self._model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._deliver = deliver
        self._waiting: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self.text = functools.lru_cache(maxsize=None)(self._text)
        in_thread(self._run)

    def submit(self, request: Request) -> None:
        self._waiting.put(request)

    def ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text).input_ids)

    def _text(self, token: int) -> str:
        return str(self._tokenizer.decode([token]))

    def _run(self) -> None:
        while True:
            batch = self._gather()
            self._generate(batch)
            self._deliver([(request, [END]) for request in batch])

    def _gather(self) -> list[Request]:
        batch = [self._waiting.get()]
        time.sleep(GATHER_S)
        while len(batch) < MAX_BATCH and not self._waiting.empty():
            batch.append(self._waiting.get())
        return batch

    def _generate(self, batch: list[Request]) -> None:
        longest = max(len(request.prompt) for request in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(batch):
            ids[row, longest - len(request.prompt) :] = torch.tensor(request.prompt)
            mask[row, longest - len(request.prompt) :] = 1
        length = max(request.max_tokens for request in batch)
        with torch.no_grad():
            self._model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=length,
                min_new_tokens=length if batch[0].ignore_eos else 0,
                do_sample=False,
                pad_token_id=0,
                streamer=Streamer(batch, self._deliver),
            )


class Streamer(BaseStreamer):
    """`generate` calls `put` with the prompts first and then with one token of each row."""

    def __init__(self, batch: list[Request], deliver: Deliver) -> None:
        self._batch = batch
        self._deliver = deliver
        self._has_prompts = False

    def put(self, value: torch.Tensor) -> None:
        if self._has_prompts:
            self._deliver([(request, [token]) for request, token in zip(self._batch, value.tolist(), strict=True)])
        self._has_prompts = True

    def end(self) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    serve(functools.partial(Transformers, arguments.folder), port=arguments.port, model="transformers")


if __name__ == "__main__":
    main()
