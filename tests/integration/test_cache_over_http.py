"""Tiers of the prefix cache over HTTP: two tenants share nothing, and each has its own again after a restart (C34)."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests import loopback
from tests.integration.tree import serving
from tests.models.tiny import random_ids

pytestmark = pytest.mark.slow

KEYS = {"alice": "alice-key-0123456789abcdef", "bob": "bob-key-0123456789abcdef"}
PROMPT = random_ids(90, seed=3)
REUSED = 80  # whole pages of 16 tokens, without the last token


def ask(http: httpx.Client, url: str, who: str) -> tuple[str, dict[str, int]]:
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = http.post(f"{url}/v1/completions", json=body, headers={"Authorization": f"Bearer {KEYS[who]}"})
    assert answer.status_code == 200, answer.text
    told = answer.json()
    tiers = told["usage"]["cache"]["tiers"]
    return told["choices"][0]["text"], {tier: count for tier, count in tiers.items() if count}


def test_c34_tiers_tenants_share_nothing_and_each_has_its_own_after_a_restart(
    tmp_path: Path, embedded_model: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("".join(f"{key} name={name}\n" for name, key in KEYS.items()))
    keys.chmod(0o600)
    flags = (
        "--dtype=float32",
        "--context-length=256",
        "--max-total-tokens=512",
        "--host-cache-bytes=256MiB",
        f"--prefix-cache-dir={tmp_path / 'cache'}",
        f"--api-key-file={keys}",
    )
    texts = set()
    for number in range(2):
        with serving(tmp_path / str(number), embedded_model, *flags) as tree, loopback.client() as http:
            for who in KEYS:
                text, tiers = ask(http, tree.url, who)
                assert tiers == ({"disk": REUSED} if number else {}), who
                again, tiers = ask(http, tree.url, who)
                assert tiers == {"device": REUSED}
                texts |= {text, again}
            tree.server.terminate()
            tree.server.wait()
    assert len(texts) == 1
