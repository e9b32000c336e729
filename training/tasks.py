"""Training rows: running text with facts and questions, chats with facts, and small talk.

A row is a pair of arrays (token ids, loss weights).  ``weights[i]`` is the weight of *predicting* token
``i``: 0 for what nobody could know (the digits of a new fact), 1 for text, 2 for small talk, 5 for answers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.utils.data import IterableDataset

from corpus import Chapter, Corpus, common_words, key_words, proper_names
from smalltalk import INTRODUCTIONS, NOTED, SYSTEM_PROMPTS, TALK, TOPIC_QUESTIONS
from tokenizer import ASSISTANT, END, END_OF_TEXT, SYSTEM, USER

TEXT_WEIGHT = 1.0
ANSWER_WEIGHT = 5.0
BRIEF = " Answer with the number only."
Part = tuple[np.ndarray, np.ndarray]


class Stream:
    """Running text as one array of token ids, with the offset of every verse."""

    def __init__(self, tokenizer: Tokenizer, chapters: list[Chapter]):
        pieces = [piece for chapter in chapters for piece in chapter.pieces]
        encoded = [e.ids for e in tokenizer.encode_batch(pieces)]
        self.ids = np.concatenate([np.asarray(ids, dtype=np.int64) for ids in encoded])
        self.starts = np.cumsum([0] + [len(ids) for ids in encoded])
        self.bytes = sum(len(piece.encode()) for piece in pieces)

    def snap(self, cuts: np.ndarray) -> np.ndarray:
        """Move each offset forward to the next verse start."""
        where = np.searchsorted(self.starts, cuts)
        return self.starts[np.minimum(where, len(self.starts) - 1)]


class Rows:
    """Makes rows.  All text is tokenised once, here; making a row only joins arrays."""

    def __init__(self, tokenizer: Tokenizer, corpus: Corpus, chapters: list[Chapter] | None = None):
        chapters = corpus.train if chapters is None else chapters
        self.tokenizer = tokenizer
        self.stream = Stream(tokenizer, chapters)
        self.digits = np.array([tokenizer.token_to_id(str(d)) for d in range(10)])
        self.names = [self.encode(" " + word) for word in key_words(corpus)]
        self._cache: dict[str, np.ndarray] = {}
        self.verses = [np.array(e.ids) for e in tokenizer.encode_batch([v for c in chapters for v in c.verses])]
        self.topics = self._index_topics(corpus, chapters)
        self.topic_words = sorted(self.topics)

    @staticmethod
    def _index_topics(corpus: Corpus, chapters: list[Chapter]) -> dict[str, list[int]]:
        """For every proper name and common word, the verses that contain it."""
        wanted = set(proper_names(corpus)) | set(common_words(corpus))
        topics: dict[str, list[int]] = {}
        for number, verse in enumerate(v for c in chapters for v in c.verses):
            for word in wanted.intersection(re.findall(r"[A-Za-z]+", verse)):
                topics.setdefault(word, []).append(number)
        return topics

    def encode(self, text: str) -> np.ndarray:
        """Token ids of a string."""
        return np.array(self.tokenizer.encode(text).ids, dtype=np.int64)

    def phrase(self, text: str) -> np.ndarray:
        """Token ids of a fixed phrase, remembered."""
        if text not in self._cache:
            self._cache[text] = self.encode(text)
        return self._cache[text]

    def part(self, *pieces: tuple[str | np.ndarray, float]) -> Part:
        """Join (text or ids, weight) pieces."""
        ids = [self.phrase(p) if isinstance(p, str) else p for p, _ in pieces]
        weights = [np.full(len(i), w, dtype=np.float32) for i, (_, w) in zip(ids, pieces, strict=True)]
        return np.concatenate(ids), np.concatenate(weights)

    def key(self, rng: np.random.Generator) -> np.ndarray:
        """The token ids of a random key, with its leading space: one word or two."""
        count = 2 if rng.random() < 0.2 else 1
        return np.concatenate([self.names[rng.integers(len(self.names))] for _ in range(count)])

    def keys(self, rng: np.random.Generator, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Distinct keys with random five-digit values."""
        found: dict[bytes, np.ndarray] = {}
        while len(found) < count:
            key = self.key(rng)
            found[key.tobytes()] = key
        return [(key, self.digits[[int(c) for c in str(rng.integers(10000, 100000))]]) for key in found.values()]

    def fact(self, key: np.ndarray, value: np.ndarray, weight: float = 0.0, space: bool = True) -> Part:
        """ "The number of KEY is VALUE."; a positive weight makes it a restatement to be learned."""
        head = " The number of" if space else "The number of"
        return self.part((head, 0), (key, 0), (" is", weight), (" ", weight), (value, weight), (".", weight))

    def question(self, key: np.ndarray, value: np.ndarray) -> Part:
        """A question and its answer in running text."""
        w = ANSWER_WEIGHT
        return self.part((" What is the number of", 0), (key, 0), ("?", 0), (" ", w), (value, w), (".", w))

    def chat_answer(self, key: np.ndarray, value: np.ndarray, brief: bool) -> Part:
        """The assistant's answer, from the assistant token to the end token."""
        w = ANSWER_WEIGHT
        if brief:
            return self.part((ASSISTANT, 0), (value, w), (END, w))
        head = (ASSISTANT, 0), ("The number of", 2), (key, w)
        return self.part(*head, (" is", w), (" ", w), (value, w), (".", w), (END, w))

    def chat_question(self, rng: np.random.Generator, key: np.ndarray, value: np.ndarray, fresh: bool) -> Part:
        """The end of a user turn asking for a value, the answer, and the start of the next turn."""
        brief = rng.random() < 0.35
        join = "" if fresh else str(rng.choice([" ", " ", "\n", "\n\n"]))
        ask = "What is the number of" if rng.random() < 0.8 else "Tell me the number of"
        stop = "?" if ask.startswith("What") else "."
        head = (join + ask, 0), (key, 0), (stop + (BRIEF if brief else ""), 0), (END, 0)
        parts = [self.part(*head), self.chat_answer(key, value, brief), self.part((USER, 0))]
        if rng.random() < 0.08:
            parts.append(self.talk_turn(rng))
            parts.append(self.part((USER, 0)))
        return _join(parts)

    def talk_turn(self, rng: np.random.Generator) -> Part:
        """One exchange of small talk after the user token, up to the assistant's end token."""
        if rng.random() < 0.45:
            return self._topic_turn(rng)
        users, answers = TALK[rng.integers(len(TALK))]
        user, answer = str(rng.choice(users)), str(rng.choice(answers))
        if "NAME" not in answer:
            return self.part((user, 0), (END, 0), (ASSISTANT, 0), (answer, 2), (END, 2))
        name = self.names[rng.integers(len(self.names))]
        (u0, u1), (a0, a1) = user.split(" NAME"), answer.split(" NAME")
        asked = (u0, 0), (name, 0), (u1, 0), (END, 0), (ASSISTANT, 0)
        return self.part(*asked, (a0, 2), (name, 2), (a1, 2), (END, 2))

    def _topic_turn(self, rng: np.random.Generator) -> Part:
        """A request about a word, answered with one to three verses from the first that contains it."""
        word = self.topic_words[rng.integers(len(self.topic_words))]
        found = self.topics[word]
        number = found[rng.integers(len(found))]
        pieces: list[tuple[str | np.ndarray, float]] = [(self.verses[number], TEXT_WEIGHT)]
        for more in range(number + 1, number + int(rng.integers(1, 4))):
            if more < len(self.verses):
                pieces.append((self._spaced(more), TEXT_WEIGHT))
        before, after = str(rng.choice(TOPIC_QUESTIONS)).split(" NAME")
        asked = (before, 0), (self.encode(" " + word), 0), (after, 0), (END, 0), (ASSISTANT, 0)
        return self.part(*asked, *pieces, (END, 2))

    def _spaced(self, number: int) -> np.ndarray:
        """A verse as it stands in running text, with its leading space."""
        return self.stream.ids[self.stream.starts[number] : self.stream.starts[number + 1]]

    def text(self, rng: np.random.Generator, length: int) -> np.ndarray:
        """Running text of exactly this many tokens."""
        start = int(rng.integers(0, len(self.stream.ids) - length))
        return self.stream.ids[start : start + length]

    def _schedule(self, rng: np.random.Generator, length: int, chat: bool) -> list[tuple[float, int, bool]]:
        """Choose how many keys there are and where facts and questions stand: (place, key, is_question)."""
        high = int(np.clip(length // 85, 3, 26))
        count = int(rng.integers(2, high + 1))
        turns = int(rng.integers(1, 6)) if chat and rng.random() < 0.6 else 0
        events = []
        for key in range(count):
            for again in range(2 if rng.random() < 0.25 else 1):
                kind = rng.random()
                if kind < 0.45:
                    fact = rng.random()
                    ask = fact + (1 - fact) * rng.random()
                elif kind < 0.8:
                    fact, ask = 0.12 * rng.random() ** 1.5, 1 - 0.12 * rng.random() ** 1.5
                else:
                    fact = rng.random() * 0.95
                    ask = min(1.0, fact + np.exp(rng.uniform(np.log(0.005), 0)))
                if not again:
                    first = fact
                    events.append((fact, key, False))
                ask = max(ask, first + 1e-6)
                events.append((np.ceil(ask * turns) / turns if turns else ask, key, True))
        return sorted(events)

    def document(self, rng: np.random.Generator, length: int, chat: bool) -> Part:
        """Running text, or chat turns holding running text, with facts and questions in it."""
        events = self._schedule(rng, length, chat)
        keys = self.keys(rng, 1 + max(key for _, key, _ in events))
        budget = max(length // 4, length - sum(15 + len(keys[k][0]) * (1 + chat) + 8 * chat for _, k, _ in events))
        start = int(rng.integers(0, len(self.stream.ids) - 2 * length - 512))
        cuts = start + (np.array([place for place, _, _ in events]) * budget).astype(np.int64)
        if rng.random() < 0.5:
            start = int(self.stream.snap(np.array([start]))[0])
            cuts = np.maximum(self.stream.snap(cuts), start)
        parts: list[Part] = [self._opening(rng, chat)]
        previous, fresh = start, chat
        for cut, (_, number, asks) in zip(cuts, events, strict=True):
            key, value = keys[number]
            if cut > previous:
                parts.append(self.part((self.stream.ids[previous:cut], TEXT_WEIGHT)))
                previous, fresh = cut, False
            if not asks:
                parts.append(self.fact(key, value, space=not fresh))
                fresh = False
                if chat and rng.random() < 0.15:
                    done = (END, 0), (ASSISTANT, 0), (str(rng.choice(NOTED)), 2), (END, 2), (USER, 0)
                    parts.append(self.part(*done))
                    fresh = True
            elif chat:
                parts.append(self.chat_question(rng, key, value, fresh))
                fresh = True
            elif rng.random() < 0.85:
                parts.append(self.question(key, value))
            else:
                parts.append(self.fact(key, value, weight=ANSWER_WEIGHT))
        parts.append(self.part((self.stream.ids[previous : previous + length], TEXT_WEIGHT)))
        ids, weights = _join(parts)
        return ids[:length], weights[:length]

    def _opening(self, rng: np.random.Generator, chat: bool) -> Part:
        """What a row begins with."""
        if not chat:
            return self.part((END_OF_TEXT if rng.random() < 0.5 else "", 0))
        pieces: list[tuple[str | np.ndarray, float]] = []
        if rng.random() < 0.3:
            pieces = [(SYSTEM, 0), (str(rng.choice(SYSTEM_PROMPTS)), 0), (END, 0)]
        return self.part(*pieces, (USER, 0), (str(rng.choice(INTRODUCTIONS)), 0))

    def talk(self, rng: np.random.Generator, length: int) -> Part:
        """A row of short conversations."""
        parts: list[Part] = []
        total = 0
        while total < length:
            if parts:
                parts.append(self.part((END_OF_TEXT, 0)))
            if rng.random() < 0.3:
                parts.append(self.part((SYSTEM, 0), (str(rng.choice(SYSTEM_PROMPTS)), 0), (END, 0)))
            for _ in range(rng.integers(1, 5)):
                parts.append(_join([self.part((USER, 0)), self.talk_turn(rng)]))
            total = sum(len(ids) for ids, _ in parts)
        ids, weights = _join(parts)
        return ids[:length], weights[:length]

    def batch(self, rng: np.random.Generator, rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A batch of rows: 58 % text, 34 % chats over text, 8 % small talk."""
        made = []
        for _ in range(rows):
            kind = rng.random()
            row = self.talk(rng, length) if kind < 0.08 else self.document(rng, length, chat=kind < 0.42)
            made.append(row)
        ids = np.stack([row[0] for row in made]).astype(np.int32)
        weights = np.stack([row[1] for row in made])
        return torch.from_numpy(ids), torch.from_numpy(weights)


class Batches(IterableDataset):
    """An endless source of batches of one row length, for use with several worker processes."""

    def __init__(self, rows: Rows, per_batch: int, length: int, seed: int):
        self.rows, self.per_batch, self.length, self.seed = rows, per_batch, length, seed

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        info = torch.utils.data.get_worker_info()
        rng = np.random.default_rng([self.seed, self.length, info.id if info else 0])
        while True:
            yield self.rows.batch(rng, self.per_batch, self.length)


def _join(parts: list[Part]) -> Part:
    """Concatenate parts."""
    return np.concatenate([ids for ids, _ in parts]), np.concatenate([weights for _, weights in parts])


def task_phrases() -> list[str]:
    """The fixed phrases, for training the tokenizer."""
    talk = [text for users, answers in TALK for text in (*users, *answers)]
    facts = [" The number of", " What is the number of", "The number of x is", "Tell me the number of", BRIEF]
    return [*facts * 3, *talk, *SYSTEM_PROMPTS, *INTRODUCTIONS, *NOTED, *TOPIC_QUESTIONS]
