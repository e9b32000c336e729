"""Keys: what full pages are known by. A page's key is a hash of its tokens and of the key of the page before it."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

KEY_BYTES = 16

Keys = Sequence[bytes]  # of a request's first pages


def extend_keys(keys: list[bytes], tokens: Sequence[int], page_size: int, num_pages: int) -> None:
    """Add the keys of the pages of `tokens` up to `num_pages`, all of them full."""
    first = len(keys)
    if first >= num_pages:
        return
    data = struct.pack(f"{(num_pages - first) * page_size}i", *tokens[first * page_size : num_pages * page_size])
    size = len(data) // (num_pages - first)
    key = keys[-1] if keys else b""
    for start in range(0, len(data), size):
        key = blake2b(key + data[start : start + size], digest_size=KEY_BYTES).digest()
        keys.append(key)
