"""Sentences of README, CONTRIBUTING and the site have at most 25 words and three numbers, outside tables and code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests import ROOT
from tests.docs.commands import pages

WORDS, NUMBERS = 25, 3
NOTEBOOK = ROOT / "docs" / "notebook.ipynb"
# what is not prose: code blocks, comments, headings, tables, titles of notes, objects of the API with their options
NOT_PROSE = [
    re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE),
    re.compile(r"<!--.*?-->", re.DOTALL),
    re.compile(r"^:::.*\n(?: +.*\n)*", re.MULTILINE),
    re.compile(r"^(?:#|\||!!!).*$", re.MULTILINE),
]
ITEM = re.compile(r"^[ >]*(?:[-*]|\d+\.) +|^ *> ?$", re.MULTILINE)
QUOTE = re.compile(r"^ *> ?", re.MULTILINE)
# code, pictures, links and addresses, and what is read of them
INLINE = [
    (re.compile(r"(`+).+?\1", re.DOTALL), "code"),
    (re.compile(r"!\[[^\]]*\]\([^)]*\)"), ""),
    (re.compile(r"\[([^\]]*)\]\([^)]*\)"), r"\1"),
    (re.compile(r"<?https?://[^\s>)]+>?"), "address"),
    (re.compile(r"\*\*|(?<!\w)[*_]|[*_](?!\w)"), ""),
]
END = re.compile(r"(?<=[.!?])[)\"'”’]*\s+")
# abbreviations, which would end a sentence, and phrases with a plainer form
AVOIDED = re.compile(
    r"\b(?:e\.g|i\.e|etc|cf|vs|approx|resp|et al)\.|\b(?:also if|but for|native size|whole commands?)\b", re.IGNORECASE
)
DATE = re.compile(r"\d{4}-\d\d-\d\d")
NAME = re.compile(r"[^\W\d]+-?\d[\w.-]*")  # H200, ResNet-50, top-1
NUMBER = re.compile(r"\d{1,3}(?:[ \u00a0]\d{3})+(?!\d)|\d+(?:[.,]\d+)*")


def prose(text: str) -> list[str]:
    """The paragraphs and list items of a page, in order, as they are read."""
    for pattern in NOT_PROSE:
        text = pattern.sub("\n", text)
    for pattern, read in INLINE:
        text = pattern.sub(read, text)
    parts = re.split(r"\n\s*\n", QUOTE.sub("", ITEM.sub("\n\n", text)))
    return [" ".join(part.split()) for part in parts if part.strip()]


def sentences(text: str) -> list[str]:
    """The sentences of a page."""
    return [sentence for part in prose(text) for sentence in END.split(part) if sentence]


def count_words(sentence: str) -> int:
    """Number of words; signs alone are none."""
    return sum(any(sign.isalnum() for sign in word) for word in sentence.split())


def count_numbers(sentence: str) -> int:
    """Number of numbers in digits; a date is one, a digit in a name none."""
    return len(NUMBER.findall(NAME.sub("name", DATE.sub("1", sentence))))


def faults(text: str) -> list[str]:
    """What is wrong with the sentences of a page, a line each."""
    found = []
    for sentence in sentences(text):
        words, numbers = count_words(sentence), count_numbers(sentence)
        if words > WORDS:
            found.append(f"{words} words: {sentence}")
        if numbers > NUMBERS:
            found.append(f"{numbers} numbers: {sentence}")
    return found + [f"{word}: {part}" for part in prose(text) for word in AVOIDED.findall(part)]


@pytest.mark.parametrize("page", [*pages(), NOTEBOOK], ids=lambda page: str(page.relative_to(ROOT)))
def test_the_sentences_of_a_page_are_short(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    if page == NOTEBOOK:
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells)
    found = faults(text)
    assert found == [], "\n".join([str(page.relative_to(ROOT)), *found])


def test_sentences_end_at_full_stops_and_with_their_paragraph_or_list_item() -> None:
    text = """# A heading of a page. With two parts

One sentence in **bold.** Another with `code. And more` and version 3.11, *e.g.* [a link. Or two](page.md).
It goes on (in brackets.) Is this one? timm's begins in lower case

- An item
  on two lines
- Another: see <https://example.org/a.b>. Then
1. a step

> A quote
> of two lines.

| a table. | is not |
| --- | --- |

```bash
a command. Not a sentence
```

::: resolute.Loader
    options:
      members: []
"""
    assert sentences(text) == [
        "One sentence in bold.",
        "Another with code and version 3.11, e.g.",
        "a link.",
        "Or two.",
        "It goes on (in brackets.",
        "Is this one?",
        "timm's begins in lower case",
        "An item on two lines",
        "Another: see address.",
        "Then",
        "a step",
        "A quote of two lines.",
    ]


def test_code_counts_as_one_word_and_a_name_or_date_not_as_several_numbers() -> None:
    assert sentences("Run `make train RES=128,160` → now.") == ["Run code → now."]
    assert count_words("Run code → now.") == 3
    assert count_numbers("On 2026-11-26 an H200 read 41 829 images/s with a ResNet-50, 1.5 % more") == 3
    assert count_numbers("at 128, 160 and 224 px, top-1 0.85") == 4


def test_long_sentences_many_numbers_and_abbreviations_are_found() -> None:
    assert faults(" ".join(["word"] * 25) + ".") == []
    assert len(faults(" ".join(["word"] * 26) + ".")) == 1
    assert faults("- 1, 2 and 3.") == []
    assert len(faults("- 1, 2, 3 and 4.")) == 1
    assert len(faults("Tools, e.g. timm, etc. are used, but for one.")) == 3
