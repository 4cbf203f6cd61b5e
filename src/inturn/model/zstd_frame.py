"""How large the content of a zstd frame says that it is, from its first bytes: before anything is decompressed."""

from __future__ import annotations

MARK = b"\x28\xb5\x2f\xfd"
HEADER_BYTES_MAX = 18
_DICTIONARY_BYTES = (0, 1, 2, 4)
_SIZE_BYTES = (0, 2, 4, 8)


def content_bytes(frame: bytes | memoryview) -> int | None:
    """None if it does not say, or is no frame."""
    head = bytes(frame[:HEADER_BYTES_MAX])
    if not head.startswith(MARK) or len(head) <= len(MARK):
        return None
    descriptor = head[4]
    is_single = bool(descriptor & 0x20)
    kind = descriptor >> 6
    size = 1 if kind == 0 and is_single else _SIZE_BYTES[kind]
    at = 5 + (not is_single) + _DICTIONARY_BYTES[descriptor & 3]
    field = head[at : at + size]
    if not size or len(field) < size:
        return None
    return int.from_bytes(field, "little") + (256 if size == 2 else 0)
