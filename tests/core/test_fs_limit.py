"""The limit of a shared directory: what must go, and that writers who know nothing of each other keep it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from raykv.core.fs_limit import (
    FILES_PER_FOLDER,
    MAX_FOLDERS,
    MIN_FILES_PER_FOLDER,
    Listed,
    folder_limit,
    is_leftover,
    least_capacity,
    num_folders,
    to_evict,
)

sizes = st.integers(1, 1 << 50)
files = st.lists(
    st.builds(Listed, st.text("0123456789abcdef", min_size=1, max_size=4), st.integers(0, 1000), st.integers(-5, 5)),
    max_size=30,
    unique_by=lambda file: file.name,
)


@given(sizes, sizes)
def test_folders_have_room_for_the_files_they_are_made_for(capacity: int, file_nbytes: int) -> None:
    folders = num_folders(capacity, file_nbytes)
    assert 1 <= folders <= MAX_FOLDERS
    limit = folder_limit(capacity, folders)
    assert 0 <= capacity - folders * limit < folders, "all of the capacity, and no more"
    assert folders == 1 or limit >= FILES_PER_FOLDER * file_nbytes
    if file_nbytes <= capacity:
        assert capacity >= least_capacity(folders, file_nbytes)


@given(sizes, sizes, sizes)
def test_a_capacity_that_is_enough_leaves_each_folder_some_blocks(first: int, capacity: int, file_nbytes: int) -> None:
    """Also for blocks of another length than those that the directory was laid out for."""
    folders = num_folders(first, file_nbytes)
    if capacity >= least_capacity(folders, file_nbytes):
        assert folder_limit(capacity, folders) >= file_nbytes * (MIN_FILES_PER_FOLDER if folders > 1 else 1)


@given(files, st.integers(0, 5000), st.randoms())
def test_the_oldest_go_and_no_more_than_must(listed: list[Listed], limit: int, dice: random.Random) -> None:
    newest = dice.choice(listed).name if listed and dice.random() < 0.5 else ""
    gone = to_evict(listed, limit, newest)
    kept = [file for file in listed if file not in gone]
    assert sum(file.nbytes for file in kept) <= limit or not kept
    if gone:
        assert sum(file.nbytes for file in [*kept, gone[-1]]) > limit, "one fewer was too few"
    for file in gone:
        if file.name == newest:
            assert not kept
        else:
            assert all(other.name == newest or other.mtime_ns >= file.mtime_ns for other in kept)
    shuffled = list(listed)
    dice.shuffle(shuffled)
    assert to_evict(shuffled, limit, newest) == gone, "the same on every node"


@given(st.integers(), st.integers(), st.floats(0, 1e6))
def test_a_leftover_is_old_or_from_the_future(mtime: int, now: int, age_s: float) -> None:
    assert is_leftover(mtime, now, age_s) == (abs(mtime - now) > age_s * 1e9)


@dataclass
class Writer:
    """One node's writer as the directory sees it: its file is there, it lists, it removes one file after the other."""

    name: str
    nbytes: int
    doomed: list[str] = field(default_factory=list)
    listed: bool = False

    def step(self, folder: dict[str, Listed], limit: int) -> bool:
        """Whether it has more to do."""
        if not self.listed:
            self.listed = True
            self.doomed = [file.name for file in to_evict(folder.values(), limit, self.name)]
        elif self.doomed:
            folder.pop(self.doomed.pop(), None)
        return bool(self.doomed)


@given(st.randoms(use_true_random=False), st.integers(50, 400))
def test_writers_keep_a_folder_within_its_limit_but_for_who_is_at_work(dice: random.Random, limit: int) -> None:
    """In any order of their steps, with clocks that are wrong by more than everything takes, and writers that die."""
    folder: dict[str, Listed] = {}
    working: list[Writer] = []
    killed: list[Writer] = []
    for number in range(100):
        if dice.random() < 0.3 and len(working) < 5:
            writer = Writer(f"{dice.randrange(40):02x}", dice.randrange(1, 50))
            folder[writer.name] = Listed(writer.name, writer.nbytes, number + dice.randrange(-1000, 1000))
            working.append(writer)
            killed = [one for one in killed if one.name != writer.name]
        elif working:
            writer = dice.choice(working)
            if dice.random() < 0.05:
                working.remove(writer)
                killed.append(writer)
            elif not writer.step(folder, limit):
                working.remove(writer)
        at_work = {writer.name for writer in [*working, *killed]}
        total = sum(file.nbytes for file in folder.values())
        assert total <= limit + sum(folder[name].nbytes for name in at_work if name in folder)
    for writer in working:
        while writer.step(folder, limit):
            pass
    last = Writer("last", 1)
    folder["last"] = Listed("last", 1, 0)
    while last.step(folder, limit):
        pass
    assert sum(file.nbytes for file in folder.values()) <= limit, "the next writer makes it right, whoever died"
