"""`serve_app` behind HAProxy: `python -m tests.cluster.serving_script PORT MODEL WORDS...`.

Prints the answers to `load.py`'s prompts."""

from __future__ import annotations

import json
import os
import sys

import ray
from ray import serve

from forebay.cluster import serve_app
from tests.cluster.load import PROMPTS, ask


def main() -> None:
    port, *words = sys.argv[1:]
    ray.init(num_cpus=2, include_dashboard=False, _temp_dir=os.environ["FB_RAY"], object_store_memory=80 << 20)
    serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
    serve.run(serve_app(words, num_replicas=2), name="forebay", route_prefix="/")
    for prompt in PROMPTS:
        print(json.dumps(ask("127.0.0.1", int(port), "", prompt)), flush=True)
    statuses = serve.status().applications["forebay"].deployments["forebay"]
    print(json.dumps({"replicas": statuses.replica_states}), flush=True)
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
