"""Changes that the generator draws: which there are, what they leave alone, and that a seed repeats them."""

import pytest

from tests.mutants.draw import AREAS, draw
from tests.mutants.mutant import REPOSITORY
from tests.mutants.sites import sites


@pytest.mark.parametrize(
    ("source", "changed"),
    [
        ("if a <= b: pass", {"if (a < b): pass", "if (not (a <= b)): pass"}),
        ("x = a and b", {"x = (a or b)", "x = (a)"}),
        ("x = not a", {"x = (a)"}),
        ("x += 2", {"pass", "x -= 2", "x += 3"}),
        ("x = min(a, b)", {"x = max(a, b)"}),
        ("raise ValueError(1)", {"pass"}),
        ("self.x = True", {"pass", "self.x = False"}),
        ("logger.info('%d', x + 1)", {"pass"}),
        ("f(a=1.5, b=c)", {"pass", "f(a=c, b=1.5)", "f(a=6.0, b=c)"}),
        ("x = {'s': a, 'ms': b}", {"x = {'s': b, 'ms': a}"}),
        ("for x in y:\n    continue", {"for x in y:\n    pass"}),
        ("ä = 'ß', a", {"ä = a, 'ß'"}),  # places are bytes
    ],
)
def test_sites_of_a_statement_are_all_its_changes(source: str, changed: set[str]) -> None:
    assert {site.apply(source) for site in sites(source)} == changed


def test_sites_leave_alone_texts_annotations_and_assertions() -> None:
    body = '    """1 < 2"""\n    assert a < 2, 1\n    x: "1 + 1" = f"{a + 1}"\n'
    source = f'"""A + B."""\ndef f(a: "1 + 2") -> "1 + 2":\n{body}'
    assert sites(source) == []


@pytest.mark.parametrize("area", AREAS)
def test_draw_is_even_by_file_repeats_with_its_seed_and_is_python(area: str) -> None:
    files = AREAS[area].files()
    drawn = draw(files, len(files) + 1, seed=5)
    assert drawn == draw(files, len(files) + 1, seed=5) != draw(files, len(files) + 1, seed=6)
    assert {change.file for change in drawn} >= {
        file for file in files if sites((REPOSITORY / "forebay" / file).read_text())
    }
    for change in drawn:
        source = (REPOSITORY / "forebay" / change.file).read_text()
        assert change.site.apply(source) != source
    assert AREAS[area].tests_of(files[0])
