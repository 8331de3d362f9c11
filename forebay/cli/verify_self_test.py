"""`forebay verify --self-test`: the table of planted faults, the circumstances that must find them, and the results."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

from rich.console import Console

from forebay.verify.run import Verification
from forebay.verify.self_test import FAULTS, Detection, Found, self_test
from forebay.verify.verdict import EXIT_DIFFERENT, EXIT_TOO_FEW, table_lines

_STYLES: Final = {Found.DETECTED: "green", Found.MISSED: "bold red", Found.NOT_SHOWN: "yellow"}


async def run_self_test(verification: Verification, word: str, console: Console) -> int:
    """Print the result of each fault of which the description or the circumstance has `word`; if the console is quiet,
    print all results as JSON. Return the exit code."""
    faults = [one for one in FAULTS if word.lower() in f"{one.about}, {one.circumstance}".lower()]
    detections = []
    with console.status("alone, one at a time"):
        await verification.ask_alone()
        async for detection in self_test(verification, faults):
            detections.append(detection)
            what = f"{detection.fault.circumstance}: {detection.what}"
            lines = table_lines(detection.found, detection.fault.about, what, ())
            console.print("\n".join(lines), style=_STYLES.get(detection.found))
    counts = Counter(detection.found for detection in detections)
    others = "".join(f", {number} {found}" for found, number in counts.items() if found is not Found.DETECTED)
    console.print(f"\n{counts[Found.DETECTED]} of {len(detections)} faults detected{others}.")
    if console.quiet:
        print(json.dumps([asdict(detection) for detection in detections], indent=2))
    return exit_code(detections)


def exit_code(detections: Sequence[Detection]) -> int:
    """Return 1 if a fault was missed, and 2 if none was detected or the circumstance of one was not shown."""
    found = {detection.found for detection in detections}
    if Found.MISSED in found:
        return EXIT_DIFFERENT
    return EXIT_TOO_FEW if Found.NOT_SHOWN in found or Found.DETECTED not in found else 0
