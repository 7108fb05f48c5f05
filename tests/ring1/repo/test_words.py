"""No text has a word twice in a row, as an edit leaves behind, and no two classes share a name."""

import re
from collections import Counter

from tests import ROOT

WORDS = set(
    re.findall(
        r"\w+", "a the an by of to in is and or on at it be as for from with that not are was were will this which has have"
    )
)
ENDS = {".md", ".py", ".yaml", ".yml", ".toml", ".js", ".html", ".cu", ".cuh", ".tpl", ".txt"}
ON_A_LINE = re.compile(r"(?<![\w.`'-])([A-Za-z][a-z]{0,4}) \1(?![\w`'-])")
OVER_LINES = re.compile(r"(?<![\w.`'-])([A-Za-z][a-z]{0,4})\s+\1(?![\w`'-])")


def twice(text: str, doubled: re.Pattern[str]) -> list[str]:
    return [found[0] for found in doubled.finditer(text) if found[1].lower() in WORDS]


def test_doubled_words_are_found() -> None:
    texts = ("it is by " + "by hand", "in it. It is", "and then, then the `the`", "of\n" + "of")
    assert [len(twice(text, OVER_LINES)) for text in texts] == [1, 0, 0, 1]
    assert not twice(texts[-1], ON_A_LINE), "two lines of code"


def test_no_text_has_a_word_twice_in_a_row() -> None:
    places = [ROOT, *(ROOT / name for name in ("hps", "hps_torch", "cuda", "docs", "deploy", "examples", "configs"))]
    found = {}
    for place in places:
        for path in place.rglob("*") if place != ROOT else place.glob("*"):
            if path.suffix in ENDS and path.is_file():
                doubled = OVER_LINES if path.suffix == ".md" else ON_A_LINE
                if problems := twice(path.read_text(), doubled):
                    found[path.name] = problems
    assert not found


def test_no_two_classes_share_a_name() -> None:
    names = Counter(
        name for path in (ROOT / "hps").rglob("*.py") for name in re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE)
    )
    assert names["Deployment"] == 1
    assert [name for name, count in names.items() if count > 1] == []
