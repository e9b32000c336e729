"""The training text: reading, cleaning, splitting, and the names found in it.

The text file is plain UTF-8 (optionally gzipped).  Blocks are separated by blank lines.  The first line
of a block is its title ("Genesis 1") and every further line is one verse or sentence.  Run as a program,
this module turns the output of the Debian ``bible`` command into such a file.
"""

from __future__ import annotations

import argparse
import collections
import gzip
import random
import re
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_EVERY = 50
HELD_OUT_OFFSET = 25
VALIDATION_OFFSET = 12

BOOKS = (
    "Genesis,Exodus,Leviticus,Numbers,Deuteronomy,Joshua,Judges,Ruth,1 Samuel,2 Samuel,1 Kings,2 Kings,"
    "1 Chronicles,2 Chronicles,Ezra,Nehemiah,Esther,Job,Psalm,Proverbs,Ecclesiastes,Song of Solomon,Isaiah,"
    "Jeremiah,Lamentations,Ezekiel,Daniel,Hosea,Joel,Amos,Obadiah,Jonah,Micah,Nahum,Habakkuk,Zephaniah,"
    "Haggai,Zechariah,Malachi,Matthew,Mark,Luke,John,Acts,Romans,1 Corinthians,2 Corinthians,Galatians,"
    "Ephesians,Philippians,Colossians,1 Thessalonians,2 Thessalonians,1 Timothy,2 Timothy,Titus,Philemon,"
    "Hebrews,James,1 Peter,2 Peter,1 John,2 John,3 John,Jude,Revelation"
).split(",")

MODERN_NAMES = (
    "Alice,Bob,Carol,Dave,Erin,Frank,Grace,Heidi,Ivan,Judy,Karl,Laura,Mallory,Nina,Oscar,Peggy,Quentin,"
    "Rupert,Sybil,Trent,Ursula,Victor,Walter,Xavier,Yvonne,Zoe,Paris,London,Berlin,Tokyo,Madrid,Oslo,Lisbon,"
    "Dublin,Vienna,Prague,Mars,Venus,Saturn,Jupiter,Apollo,Orion,Boston,Chicago,Dallas,Denver,Seattle,apple,"
    "banana,cherry,orange,lemon,tiger,eagle,falcon,otter,badger,server,printer,laptop,router,engine,train,"
    "ticket,locker,room,account,order,parcel,invoice,project,kitchen,garden,bicycle,piano,violin,guitar"
).split(",")


@dataclass(frozen=True)
class Chapter:
    """One block of the text file."""

    title: str
    verses: tuple[str, ...]

    @property
    def pieces(self) -> list[str]:
        """The chapter as strings whose concatenation is its running text."""
        first, *rest = self.verses
        return [f"\n\n{self.title}\n{first}", *(f" {verse}" for verse in rest)]


@dataclass(frozen=True)
class Corpus:
    """The text split into chapters to train on, to steer the training by, and to measure the result on."""

    train: list[Chapter]
    validation: list[Chapter]
    held_out: list[Chapter]


def read_text(path: str | Path) -> str:
    """Read a plain or gzipped UTF-8 text file."""
    path = Path(path)
    if path.suffix == ".gz":
        with gzip.open(path, "rt", encoding="utf-8") as handle:
            return handle.read()
    return path.read_text(encoding="utf-8")


def read_corpus(path: str | Path) -> Corpus:
    """Read the text file; hold out two chapters in every ``HELD_OUT_EVERY``, one for validation."""
    chapters = []
    for block in re.split(r"\n\s*\n", read_text(path).strip()):
        lines = [line.strip() for line in block.splitlines() if line.strip()]
        if len(lines) >= 2:
            chapters.append(Chapter(lines[0], tuple(lines[1:])))
    held = chapters[HELD_OUT_OFFSET::HELD_OUT_EVERY]
    validation = chapters[VALIDATION_OFFSET::HELD_OUT_EVERY]
    apart = {VALIDATION_OFFSET, HELD_OUT_OFFSET}
    train = [c for i, c in enumerate(chapters) if i % HELD_OUT_EVERY not in apart]
    return Corpus(train=train, validation=validation, held_out=held)


def word_counts(corpus: Corpus) -> collections.Counter[str]:
    """Count the words of the training chapters, keeping their capitals."""
    counts: collections.Counter[str] = collections.Counter()
    for chapter in corpus.train:
        for verse in chapter.verses:
            counts.update(re.findall(r"[A-Za-z]+", verse))
    return counts


def proper_names(corpus: Corpus) -> list[str]:
    """Words written with a capital in the middle of a sentence and never without one."""
    counts = word_counts(corpus)
    found: set[str] = set()
    for chapter in corpus.train:
        for verse in chapter.verses:
            found.update(re.findall(r"(?<=[a-z,] )[A-Z][a-z]{2,}", verse))
    return sorted(name for name in found if name.lower() not in counts)


def common_words(corpus: Corpus, low: int = 5, high: int = 800) -> list[str]:
    """Lower-case words of medium frequency."""
    counts = word_counts(corpus)
    return sorted(w for w, n in counts.items() if w.islower() and len(w) >= 4 and low <= n <= high)


def invented_names(count: int, seed: int = 7) -> list[str]:
    """Pronounceable made-up names, so that keys do not all come from the text."""
    rng = random.Random(seed)
    names: set[str] = set()
    while len(names) < count:
        syllables = (
            rng.choice("bcdfghjklmnprstvwz") + rng.choice("aeiou") + rng.choice(["", "", "n", "r", "l", "s", "x"])
            for _ in range(rng.randint(2, 3))
        )
        names.add("".join(syllables).capitalize())
    return sorted(names)


def key_words(corpus: Corpus) -> list[str]:
    """Every word that may serve as (part of) the key of a fact."""
    rng = random.Random(11)
    names = proper_names(corpus)
    words = common_words(corpus)
    upper = [w.upper() for w in rng.sample(names, min(200, len(names)))]
    return names + rng.sample(words, min(1500, len(words))) + invented_names(1500) + MODERN_NAMES * 3 + upper


def clean_bible_output(raw: str) -> str:
    """Turn ``bible -f 'gen1:1-rev22:21'`` output ("Ge1:1 In the beginning...") into titled blocks."""
    blocks: list[list[str]] = []
    books: list[str] = []
    previous = ""
    for line in raw.splitlines():
        match = re.match(r"(\d?[A-Za-z]+)(\d+):(\d+) (.*)", line)
        if not match:
            continue
        book, chapter, _, verse = match.groups()
        if book not in books:
            books.append(book)
        title = f"{BOOKS[len(books) - 1]} {chapter}"
        if title != previous:
            blocks.append([title])
            previous = title
        blocks[-1].append(re.sub(r"\s+", " ", verse).strip())
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def main() -> None:
    """Convert the output of the ``bible`` command."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--bible-output", required=True, help="what `bible -f gen1:1-rev22:21` printed")
    parser.add_argument("--out", default="training/kjv.txt.gz")
    args = parser.parse_args()
    data = clean_bible_output(read_text(args.bible_output)).encode()
    if args.out.endswith(".gz"):
        data = gzip.compress(data, 9, mtime=0)
    Path(args.out).write_bytes(data)
    corpus = read_corpus(args.out)
    print(f"{len(corpus.train)} chapters to train on, {2 * len(corpus.held_out)} held out, {len(data)} bytes")


if __name__ == "__main__":
    main()
