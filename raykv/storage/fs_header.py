"""What a file of a shared directory is: its name, its folder, and the page before its bytes.

    <path>/raykv-fs-1/layout                                 over how many folders the files are spread
    <path>/raykv-fs-1/<index / 256>/<index % 256>/<key>     one block: a page of header, then its bytes
    <path>/raykv-fs-1/.../.<key>.<writer>.tmp               one that is being written

Every name is made of hexadecimal digits of a key, so none can lead out of the directory. The index comes from a digest
of the key, which spreads blocks evenly; the key itself begins with the fingerprint, the same for all of a model.

The header carries a check of its whole page, in which the key is, so that a file under another's name is none.
"""

from __future__ import annotations

import re
import struct
from typing import NamedTuple

import xxhash

from raykv.store_messages import KEY_NBYTES

HEADER_NBYTES = 4096
"""A page: the block's bytes begin at one too, and lie in as few pages as they can."""
VERSION = 1
BASE = f"raykv-fs-{VERSION}"
"""So that another version finds nothing to misread, or to remove."""
LAYOUT = "layout"

_MAGIC = b"RAYKVFSB"
_BODY = struct.Struct(f"<8sQQQ{KEY_NBYTES}s")  # magic, version, nbytes, checksum, key
_CHECK = struct.Struct("<Q")
_PAD = bytes(HEADER_NBYTES - _BODY.size - _CHECK.size)
_LAYOUT_MAGIC = b"RAYKVFSL"
_LAYOUT = struct.Struct("<8sQQ")  # magic, version, folders
_NAME = re.compile(f"[0-9a-f]{{{2 * KEY_NBYTES}}}")
_TEMP = re.compile(rf"\.[0-9a-f]{{{2 * KEY_NBYTES}}}\.[0-9a-f]{{1,32}}\.tmp")


class BlockFile(NamedTuple):
    """What a header says of the bytes behind it."""

    key: bytes
    nbytes: int
    checksum: int


def file_name(key: bytes) -> str:
    """Raises ValueError for what is no key."""
    if len(key) != KEY_NBYTES:
        raise ValueError(f"A key has {KEY_NBYTES} bytes, not {len(key)}.")
    return key.hex()


def temp_name(key: bytes, writer: str) -> str:
    """`writer`: hexadecimal digits, never used twice."""
    return f".{file_name(key)}.{writer}.tmp"


def is_block(name: str) -> bool:
    """Whether a file of this name holds a block, or says so."""
    return _NAME.fullmatch(name) is not None


def is_temp(name: str) -> bool:
    """Whether a file of this name is one that is being written."""
    return _TEMP.fullmatch(name) is not None


def folder_index(key: bytes, folders: int) -> int:
    """Which of so many folders a key's file is in."""
    return xxhash.xxh3_64_intdigest(key) % folders


def folder_names(index: int) -> tuple[str, str]:
    """The two levels of a folder."""
    return f"{index >> 8:03x}", f"{index & 255:02x}"


def pack_header(block: BlockFile) -> bytes:
    """HEADER_NBYTES that `read_header` reads."""
    page = _BODY.pack(_MAGIC, VERSION, block.nbytes, block.checksum, block.key) + _PAD
    return page + _CHECK.pack(xxhash.xxh3_64_intdigest(page))


def read_header(page: bytes | bytearray | memoryview) -> BlockFile | None:
    """None if it can't be believed, or is of another version."""
    if len(page) < HEADER_NBYTES:
        return None
    magic, version, nbytes, checksum, key = _BODY.unpack_from(page)
    (check,) = _CHECK.unpack_from(page, HEADER_NBYTES - _CHECK.size)
    if (magic, version) != (_MAGIC, VERSION) or check != xxhash.xxh3_64_intdigest(page[: HEADER_NBYTES - _CHECK.size]):
        return None
    return BlockFile(key, nbytes, checksum)


def pack_layout(folders: int) -> bytes:
    """What `read_layout` reads."""
    body = _LAYOUT.pack(_LAYOUT_MAGIC, VERSION, folders)
    return body + _CHECK.pack(xxhash.xxh3_64_intdigest(body))


def read_layout(data: bytes) -> int | None:
    """The number of folders; None if it is not a whole layout of this version."""
    if len(data) != _LAYOUT.size + _CHECK.size:
        return None
    magic, version, folders = _LAYOUT.unpack_from(data)
    (check,) = _CHECK.unpack_from(data, _LAYOUT.size)
    believed = check == xxhash.xxh3_64_intdigest(data[: _LAYOUT.size])
    return folders if believed and (magic, version) == (_LAYOUT_MAGIC, VERSION) and folders > 0 else None
