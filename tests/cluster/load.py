"""Requests for a while, in a process of their own: `load.py URL SECONDS THREADS KEY`. Prints a JSON line for each: when
it began and ended, its status or error, its text, and the server that answered."""

from __future__ import annotations

import http.client
import json
import sys
import threading
import time

PROMPTS = [[5 + i, *([6, 7, 8] * 9)] for i in range(4)]


def ask(host: str, port: int, key: str, prompt: list[int], num_tokens: int = 24) -> dict[str, object]:
    """Return what became of one request."""
    began = time.time()
    connection = http.client.HTTPConnection(host, port)
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        found = json.loads(answer.read())
        ok = answer.status == 200
        text = found["choices"][0]["token_ids"] if ok else found["error"]["code"]
        return {
            "began": began, "ended": time.time(), "status": answer.status, "text": text, "prompt": prompt[0],
            "server": answer.getheader("x-forebay-server"), "route": answer.getheader("x-forebay-route"),
        }  # fmt: skip
    except (OSError, http.client.HTTPException) as error:
        return {"began": began, "ended": time.time(), "status": 0, "text": repr(error), "prompt": prompt[0]}
    finally:
        connection.close()


def main() -> None:
    url, seconds, threads, *rest = sys.argv[1:]
    host, _, port = url.removeprefix("http://").partition(":")
    end, lock = time.time() + float(seconds), threading.Lock()

    def work(number: int) -> None:
        while time.time() < end:
            found = ask(host, int(port), rest[0] if rest else "", PROMPTS[number % len(PROMPTS)])
            with lock:
                print(json.dumps(found), flush=True)
            time.sleep(0.02 if found["status"] == 200 else 0.2)

    running = [threading.Thread(target=work, args=(i,)) for i in range(int(threads))]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()


if __name__ == "__main__":
    main()
