"""The limit of a shared directory that many nodes fill, kept by each of them alone: the arithmetic.

The theory. Blocks are spread over F folders by a digest of their key, so each folder gets its share of them, and each
folder is bounded by itself, at capacity / F. Who has put a file into a folder lists that folder then, and removes its
oldest files until it is within its limit. Nothing is counted, agreed on or remembered anywhere, so nothing can drift
after a crash, and no node needs to know of another.

Bound. Of the writers that are through, take the one whose file came into the folder last: its listing, which is later,
had the files of all the others, and it removed down to the limit. Files that came later are of writers that are not
through. So at any time

    bytes in the directory <= capacity + the blocks of writers that are at work (or were killed at it)

The price: files lie unevenly, by about the square root of their number in a folder. With FILES_PER_FOLDER files that
is an eighth: some folders evict when the whole is two thirds full, and of a working set as large as the capacity about
5 in 100 blocks find no room. Once all folders have been full the capacity is used in full.

Who goes first is decided by the files' own times, which all nodes see alike. A clock that is wrong keeps its node's
blocks too long or not long enough, and changes nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

FILES_PER_FOLDER = 64
"""A listing costs one or two round trips and 64 entries; fewer would lie less evenly."""
MIN_FILES_PER_FOLDER = 4
"""Of the largest blocks of any model that shares the directory."""
MAX_FOLDERS = 1 << 18
"""In two levels of at most 1024 and 256."""


class Listed(NamedTuple):
    """A file of a folder: its length in bytes, and its last change in nanoseconds, as the file system says."""

    name: str
    nbytes: int
    mtime_ns: int


def num_folders(capacity: int, file_nbytes: int) -> int:
    """Over how many folders a new directory spreads files of this length (bytes)."""
    return max(1, min(MAX_FOLDERS, capacity // (file_nbytes * FILES_PER_FOLDER)))


def folder_limit(capacity: int, folders: int) -> int:
    """The bytes that one folder may hold."""
    return capacity // folders


def least_capacity(folders: int, file_nbytes: int) -> int:
    """The least capacity with which a directory of so many folders is of use for files of this length."""
    return folders * file_nbytes * (MIN_FILES_PER_FOLDER if folders > 1 else 1)


def to_evict(files: Iterable[Listed], limit: int, newest: str = "") -> list[Listed]:
    """The oldest files that must go so that the rest is within the limit. `newest`, the caller's own, goes last.

    The same listing gives the same answer on every node, so two that trim at once don't remove twice as much.
    """
    order = sorted(files, key=lambda file: (file.name == newest, file.mtime_ns, file.name))
    over = sum(file.nbytes for file in order) - limit
    gone = []
    for file in order:
        if over <= 0:
            break
        gone.append(file)
        over -= file.nbytes
    return gone


def is_leftover(mtime_ns: int, now_ns: int, age_s: float) -> bool:
    """Whether a file that is being written was last written so long ago that its writer must be dead.

    Also if its time is as far ahead. Where clocks differ by more than `age_s` a living writer loses its block, and
    no more: it finds its file gone.
    """
    return abs(now_ns - mtime_ns) > age_s * 1e9
