"""Texts of which the prompts of a comparison are made: several languages, code, lists and records."""

from __future__ import annotations

from typing import Final

TEXTS: Final = (
    "A river begins as rain that nobody owns. It runs off roofs and leaves, finds the lowest place it can, and by the "
    "time it has a name on a map it has turned mills, watered cattle and carried timber to three different towns. ",
    "def area(shape):\n    if shape.kind == 'circle':\n        return 3.14159 * shape.radius ** 2\n"
    "    if shape.kind == 'square':\n        return shape.side * shape.side\n    raise ValueError(shape.kind)\n\n",
    "Der Zug nach Norden hatte Verspätung. Auf dem Bahnsteig standen Leute mit Fahrrädern, Kinder zählten Waggons. ",
    "1. Wash the rice until the water is clear.\n2. Bring it to the boil with twice as much water.\n3. Cover it, and "
    "wait eighteen minutes.\n4. Let it stand before you stir.\n\n",
    'The record reads {"name": "Ada", "born": 1815, "field": "mathematics", "notes": ["engine", "numbers"]}, and the '
    'next one {"name": "Alan", "born": 1912, "field": "logic", "notes": ["machine", "codes"]}. ',
    "昨日は雨が降っていましたが、今日はとても良い天気です。 La mer était calme et le vent venait du sud. ",
    "Question: why is the sky blue? Answer: because air scatters short waves of light more than long ones. Question: "
    "and why is the evening red? Answer: ",
)
