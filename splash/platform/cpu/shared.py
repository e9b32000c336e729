"""How much memory the ranks of a host share. The process that launches them reckons it, and never needs torch."""

from __future__ import annotations

import mmap

MAILBOX_BYTES = 8 << 20  # payloads beyond this travel in several rounds; only pages that are touched take memory
LINE_WORDS = 16  # words (int64) of a rank's control line: two adjacent cache lines, because x86 prefetches pairs


def arena_file_bytes(num_layers: int, arena_bytes: int) -> int:
    """Bytes of one rank's memory file: every arena starts on a memory page, whatever a slot's size."""
    return num_layers * -(-arena_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def mailbox_memory_bytes(ranks: int) -> int:
    """Bytes of shared memory that the communicators of `ranks` ranks need, zero at first."""
    return header_bytes(ranks) + 2 * ranks * MAILBOX_BYTES


def table_words(ranks: int) -> int:
    """Words of one all_to_all table (where each destination's elements start), padded to a control line."""
    return -(-(ranks + 1) // LINE_WORDS) * LINE_WORDS


def header_bytes(ranks: int) -> int:
    """Bytes before the mailboxes: of each rank a control line and two tables."""
    words = ranks * (LINE_WORDS + 2 * table_words(ranks))
    return -(-words * 8 // mmap.PAGESIZE) * mmap.PAGESIZE
