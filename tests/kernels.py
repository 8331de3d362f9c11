"""Which native kernels the suite is run with: the best that the CPU has, or those that FOREBAY_KERNELS names.

`FOREBAY_KERNELS=avx2 make test` is the suite as it is on a machine without AVX-512. Servers that tests start read the
variable themselves; what tests make in their own process is made with `NATIVE`.
"""

from __future__ import annotations

import os

NATIVE = os.environ.get("FOREBAY_KERNELS", "native")
