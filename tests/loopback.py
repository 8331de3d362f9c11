"""HTTP to servers on this machine: through no proxy, with no deadline but the suite's, and without the certificates of
all authorities, which take longer to read than most tests."""

from __future__ import annotations

from functools import partial

import httpx

from tests.deadlines import HANGS_S

get = partial(httpx.get, timeout=HANGS_S, trust_env=False, verify=False)
post = partial(httpx.post, timeout=HANGS_S, trust_env=False, verify=False)
stream = partial(httpx.stream, timeout=HANGS_S, trust_env=False, verify=False)
client = partial(httpx.Client, timeout=HANGS_S, trust_env=False, verify=False)
async_client = partial(httpx.AsyncClient, timeout=HANGS_S, trust_env=False, verify=False)
