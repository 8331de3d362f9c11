from __future__ import annotations

from typing import Final

from forebay.families.architecture import PRE_NORM, Architecture

# The base in the files is the stretched one.
ARCHITECTURES: Final = {"hunyuan-dense": Architecture(block_names=PRE_NORM)}
