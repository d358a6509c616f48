"""The fs pool over real files: whole blocks or none, within its directory, within its limit."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import shutil
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from raykv.errors import DiskError, StorageError
from raykv.storage import fs_open, fs_trim
from raykv.storage.checksum import checksum
from raykv.storage.fs_header import HEADER_NBYTES, BlockFile, is_block, is_temp, pack_header, read_header, temp_name
from raykv.storage.fs_pool import FsPool
from raykv.storage.headers import Header, SlotState

pytestmark = pytest.mark.process

SLOT = 8192
FILE = SLOT + HEADER_NBYTES


def key(number: int) -> bytes:
    return b"f" * 16 + b"\0" + hashlib.sha256(str(number).encode()).digest()


def data(number: int, nbytes: int = SLOT) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(number))


def header(number: int, nbytes: int = SLOT) -> Header:
    return Header(SlotState.READY, key(number), nbytes)


class Pools:
    """Pools over one directory, each as another node's."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pools: list[FsPool] = []

    def open(self, files: int = 64, slot: int = SLOT, **options: Any) -> FsPool:
        self.pools.append(FsPool.open(str(self.path), files * FILE, slot, **{"sweep_s": 3600.0, **options}))
        return self.pools[-1]

    def files(self) -> list[Path]:
        return sorted(path for path in self.path.rglob("*") if is_block(path.name))

    def temps(self) -> list[Path]:
        return [path for path in self.path.rglob(".*") if is_temp(path.name)]

    def file(self, number: int) -> Path:
        (path,) = (path for path in self.files() if path.name == key(number).hex())
        return path

    def nbytes(self) -> int:
        return sum(path.lstat().st_size for path in [*self.files(), *self.temps()])

    def put(self, pool: FsPool, *numbers: int) -> None:
        for number in numbers:
            pool.write(key(number), SLOT, checksum(data(number)), data(number))

    def get(self, pool: FsPool, number: int) -> bool:
        """Whether it is served; then it is right, and else nothing was touched."""
        out = torch.full((SLOT + 64,), 7, dtype=torch.uint8)
        good = pool.read(header(number), out)
        assert torch.equal(out[:SLOT], data(number)) if good else bool((out == 7).all())
        assert bool((out[SLOT:] == 7).all())
        return good


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Pools]:
    folder = tmp_path / "shared"
    folder.mkdir(mode=0o700)
    pools = Pools(folder)
    yield pools
    for pool in pools.pools:
        pool.close()
    assert not any(thread.name == "raykv-fs-sweep" for thread in threading.enumerate())


# -- blocks -------------------------------------------------------------------------------------------------


def test_what_one_node_wrote_another_reads(shared: Pools) -> None:
    first, second = shared.open(), shared.open()
    assert not shared.get(second, 1) and second.look(key(1)).result() is None
    shared.put(first, 1, 2)
    assert second.look(key(1)).result() == BlockFile(key(1), SLOT, checksum(data(1)))
    assert shared.get(second, 1) and shared.get(second, 2) and shared.get(first, 1)
    assert first.write(key(1), SLOT, None, data(1)) is False, "it is there already"
    assert (first.counts["written"], second.counts["gone"], second.counts["bad"]) == (2, 1, 0)


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, SLOT])
def test_any_length(shared: Pools, nbytes: int) -> None:
    pool = shared.open()
    pool.write(key(1), nbytes, None, data(1, nbytes))
    out = torch.zeros(SLOT, dtype=torch.uint8)
    assert pool.read(header(1, nbytes), out) and torch.equal(out[:nbytes], data(1, nbytes))
    assert not pool.read(header(1, nbytes + 1), out), "another length than is wanted is no hit"
    assert shared.file(1).stat().st_size == HEADER_NBYTES + nbytes


def test_a_block_larger_than_a_slot_is_not_read_and_stays(shared: Pools) -> None:
    large, small = shared.open(slot=2 * SLOT), shared.open()
    large.write(key(1), 2 * SLOT, None, data(1, 2 * SLOT))
    assert not small.read(header(1, 2 * SLOT), torch.zeros(2 * SLOT, dtype=torch.uint8))
    assert large.read(header(1, 2 * SLOT), torch.zeros(2 * SLOT, dtype=torch.uint8))


def test_of_two_hundred_corruptions_none_is_served(shared: Pools) -> None:
    pool = shared.open()
    dice = random.Random(1)
    for number in range(200):
        shared.put(pool, number)
        path = shared.file(number)
        raw = bytearray(path.read_bytes())
        kind = dice.choice(["flip", "header", "cut", "torn", "more", "other"])
        if kind in ("flip", "header"):
            at = dice.randrange(HEADER_NBYTES if kind == "header" else len(raw))
            raw[at] ^= 1 << dice.randrange(8)
        elif kind == "cut":
            del raw[dice.randrange(len(raw)) :]
        elif kind == "torn":
            start = dice.randrange(len(raw) - 512)
            raw[start : start + 512] = dice.randbytes(512)
        elif kind == "more":
            raw += bytes(dice.randrange(1, 100))
        else:
            raw[:HEADER_NBYTES] = pack_header(BlockFile(key(number + 1), SLOT, checksum(data(number))))
        path.write_bytes(raw)
        assert not shared.get(pool, number), kind
        assert shared.files() == [], "and it is gone"
    assert (pool.counts["bad"], pool.counts["gone"]) == (200, 0)


def test_a_look_finds_bad_headers_and_lengths(shared: Pools) -> None:
    pool = shared.open()
    shared.put(pool, 1, 2)
    os.truncate(shared.file(1), FILE - 1)
    shared.file(2).write_bytes(b"")
    assert pool.look(key(1)).result() is None and pool.look(key(2)).result() is None
    assert shared.files() == [] and pool.counts["bad"] == 2


def test_a_reader_with_an_open_file_reads_it_to_the_end_though_it_is_evicted(shared: Pools) -> None:
    pool = shared.open()
    shared.put(pool, 1)
    fd = os.open(shared.file(1), os.O_RDONLY)
    shared.file(1).unlink()
    raw = os.read(fd, 2 * FILE)
    os.close(fd)
    assert read_header(raw[:HEADER_NBYTES]) == BlockFile(key(1), SLOT, checksum(raw[HEADER_NBYTES:]))
    assert not shared.get(pool, 1) and pool.counts["gone"] == 1


def test_readers_and_an_evicting_writer_race_and_nothing_wrong_is_read(shared: Pools) -> None:
    writer, readers = shared.open(files=4), [shared.open(files=4) for _ in range(2)]
    stop = threading.Event()
    served = [0, 0]
    wrong: list[BaseException] = []

    def read(number: int) -> None:
        try:
            while not stop.is_set():
                for one in range(12):
                    served[number] += shared.get(readers[number], one)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    rounds = 0
    while rounds < 20 or not all(served):
        shared.put(writer, *range(12))
        rounds += 1
        assert shared.nbytes() <= 4 * FILE
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong and writer.counts["evicted"] >= 20 * 8
    assert all(pool.counts["bad"] == 0 for pool in shared.pools)


# -- the limit ----------------------------------------------------------------------------------------------


def test_four_nodes_keep_one_limit(shared: Pools) -> None:
    pools = [shared.open(files=300) for _ in range(4)]
    limit = 300 * FILE
    peak = 0

    def fill(node: int) -> None:
        shared.put(pools[node], *range(node * 200, node * 200 + 200))

    threads = [threading.Thread(target=fill, args=(node,)) for node in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        # One listing at a time: a walk through all folders would count files that went meanwhile and those that came.
        for folder in [path for path in shared.path.rglob("*") if path.is_dir()]:
            peak = max(peak, sum(map(is_block, os.listdir(folder))))
    for thread in threads:
        thread.join()
    assert pools[0]._folder is not None and pools[0]._folder.folders == 4
    assert 50 <= peak <= 300 // 4 + 4, "a folder's share of the limit, and one block in flight a node"
    assert 0.95 * limit <= shared.nbytes() <= limit, "full, and not over it"
    assert sum(pool.counts["written"] for pool in pools) == 800
    assert sum(pool.counts["evicted"] for pool in pools) == 800 - len(shared.files())


def test_the_oldest_goes_first_and_what_is_read_is_young_again(shared: Pools) -> None:
    pool = shared.open(files=3)
    shared.put(pool, 1, 2, 3)
    for number, age in ((1, 3000), (2, 2000), (3, 1000)):
        os.utime(shared.file(number), (0, shared.file(number).stat().st_mtime - age))
    assert shared.get(pool, 1)
    shared.put(pool, 4)
    assert [shared.get(pool, number) for number in (1, 2, 3, 4)] == [True, False, True, True]


def test_a_file_that_was_touched_lately_is_not_touched_again(shared: Pools) -> None:
    pool = shared.open()
    shared.put(pool, 1)
    before = shared.file(1).stat().st_mtime_ns
    assert shared.get(pool, 1) and shared.file(1).stat().st_mtime_ns == before


def test_files_from_the_future_are_bounded_too(shared: Pools) -> None:
    pool = shared.open(files=3)
    for number in range(9):
        shared.put(pool, number)
        os.utime(shared.file(number), (0, 4e9 - number))
    assert len(shared.files()) == 3 and shared.get(pool, 8)


def test_a_leftover_is_removed_and_what_is_being_written_is_not(shared: Pools) -> None:
    pool = shared.open(files=3)
    shared.put(pool, 1)
    folder = shared.file(1).parent
    old, young, strange = folder / temp_name(key(7), "a"), folder / temp_name(key(8), "b"), folder / "README"
    for path in (old, young, strange):
        path.write_bytes(bytes(SLOT))
    os.utime(old, (0, old.stat().st_mtime - fs_trim.LEFTOVER_S - 1))
    shared.put(pool, 2)
    assert not old.exists() and young.exists() and strange.exists()
    assert pool.counts["leftovers"] == 1


def test_the_sweeper_removes_leftovers_where_nobody_writes(shared: Pools) -> None:
    pool = shared.open(files=3)
    shared.put(pool, 1)
    old = shared.file(1).parent / temp_name(key(7), "a")
    old.write_bytes(b"")
    os.utime(old, (0, 1))
    sweeping = shared.open(files=3, sweep_s=0.01)
    for _ in range(3000):
        if sweeping.counts["leftovers"]:
            break
        threading.Event().wait(0.01)
    assert not old.exists() and shared.get(pool, 1)


def test_a_smaller_capacity_wins_where_nodes_differ(shared: Pools) -> None:
    large, small = shared.open(files=8), shared.open(files=4)
    shared.put(large, *range(8))
    assert len(shared.files()) == 8
    shared.put(small, 9)
    assert len(shared.files()) == 4 and shared.get(large, 9)


# -- names and rights ---------------------------------------------------------------------------------------


def test_files_and_folders_are_this_users_alone(shared: Pools) -> None:
    before = os.umask(0)
    try:
        pool = shared.open()
        shared.put(pool, 1)
    finally:
        os.umask(before)
    for path in shared.path.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_in_a_folder_of_a_group_the_group_reads_and_writes(shared: Pools) -> None:
    shared.path.chmod(0o2770)
    before = os.umask(0o077)
    try:
        shared.put(shared.open(), 1)
    finally:
        os.umask(before)
    for path in shared.path.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o777 == (0o770 if path.is_dir() else 0o640), path


def test_where_anybody_can_write_nothing_is_read(shared: Pools) -> None:
    shared.path.chmod(0o1777)
    with pytest.raises(StorageError, match="chmod o-w"):
        shared.open()


def test_a_key_that_is_none_makes_no_name(shared: Pools) -> None:
    pool = shared.open()
    for wrong in (b"", b"../../../etc/passwd", bytes(48), bytes(50)):
        with pytest.raises(ValueError, match="49 bytes"):
            pool.write(wrong, 1, None, data(1))
        with pytest.raises(ValueError, match="49 bytes"):
            pool.look(wrong).result()
    nasty = b"/../" * 12 + b"\0"
    pool.write(nasty, SLOT, None, data(1))
    assert [path.name for path in shared.files()] == [nasty.hex()]
    outside = set(shared.path.parent.rglob("*")) - set(shared.path.rglob("*")) - {shared.path}
    assert not outside


def test_no_link_is_followed(shared: Pools, tmp_path: Path) -> None:
    pool = shared.open()
    shared.put(pool, 1, 2)
    precious = tmp_path / "precious"
    precious.write_bytes(shared.file(1).read_bytes())
    one, two = shared.file(1), shared.file(2).read_bytes()
    one.unlink()
    one.symlink_to(precious)
    assert not shared.get(pool, 1) and pool.look(key(1)).result() is None
    shared.put(pool, 1)
    assert not one.is_symlink() and shared.get(pool, 1), "a write replaces the link, not what it points to"
    level = one.parent.parent
    level.rename(tmp_path / "elsewhere")
    level.symlink_to(tmp_path / "elsewhere")
    assert not shared.get(pool, 2)
    with pytest.raises(DiskError) as caught:
        shared.put(pool, 3)
    assert not caught.value.fatal
    assert (tmp_path / "elsewhere" / "00" / key(2).hex()).read_bytes() == two


def test_a_pipe_under_a_blocks_name_blocks_nobody(shared: Pools) -> None:
    pool = shared.open()
    shared.put(pool, 1)
    path = shared.file(1)
    path.unlink()
    os.mkfifo(path)
    assert not shared.get(pool, 1)


# -- a directory that fails ---------------------------------------------------------------------------------


def test_a_missing_folder_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="Mount the shared file system"):
        FsPool.open(str(tmp_path / "no"), 1 << 20, SLOT)
    assert not (tmp_path / "no").exists()


def test_a_file_in_the_folders_place(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="Not a directory"):
        FsPool.open(str(tmp_path / "file"), 1 << 20, SLOT)


def test_a_capacity_below_what_the_layout_needs(shared: Pools) -> None:
    shared.open(files=1000)
    with pytest.raises(StorageError, match=r"15 folders.*larger `capacity`"):
        shared.open(files=59)
    shared.open(files=60)


def test_a_damaged_layout_is_an_error_with_a_fix(shared: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fs_open, "_LAYOUT_WAIT_S", 0.0)
    shared.open().close()
    (layout,) = shared.path.rglob("layout")
    layout.write_bytes(b"torn")
    with pytest.raises(StorageError, match="layout is damaged"):
        shared.open()


def test_without_hard_links_the_layout_is_agreed_on_too(shared: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any, **options: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, "no links here")

    monkeypatch.setattr(os, "link", refused)
    first, second = shared.open(files=1000), shared.open(files=100)
    assert first._folder is not None and second._folder is not None
    assert first._folder.folders == second._folder.folders == 15
    assert not [path for path in shared.path.rglob(".layout*")]


@pytest.mark.parametrize(
    ("number", "fatal"),
    [
        (errno.EIO, True),
        (errno.ENOSPC, True),
        (errno.EDQUOT, True),
        (errno.EROFS, True),
        (errno.EACCES, True),
        (errno.ETIMEDOUT, True),
        (errno.EMFILE, False),
    ],
)
@pytest.mark.parametrize("call", ["open", "writev", "rename"])
def test_errors_of_writes(shared: Pools, monkeypatch: pytest.MonkeyPatch, call: str, number: int, fatal: bool) -> None:
    pool = shared.open()
    shared.put(pool, 1)

    def failing(*args: Any, **options: Any) -> Any:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        with pytest.raises(DiskError, match=os.strerror(number)) as caught:
            shared.put(pool, 2)
    assert caught.value.fatal is fatal
    assert not shared.temps() and shared.get(pool, 1) and not shared.get(pool, 2)


def test_a_close_that_fails_is_a_write_that_failed(shared: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS tells of a full server there."""
    pool, close = shared.open(), os.close
    broken: list[int] = []

    def failing(fd: int) -> None:
        was_file = stat.S_ISREG(os.fstat(fd).st_mode)
        close(fd)
        if was_file:
            broken.append(fd)
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", failing)
        with pytest.raises(DiskError, match="No space") as caught:
            shared.put(pool, 1)
    assert caught.value.fatal and broken and not shared.files() and not shared.temps()


def test_a_stale_file_is_a_miss_and_a_stale_directory_is_the_end(
    shared: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, fstat = shared.open(), os.fstat
    shared.put(pool, 1)

    def stale(*args: Any) -> Any:
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", stale)
        assert not shared.get(pool, 1)
    assert shared.get(pool, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", stale)
        patch.setattr(os, "fstat", stale)
        with pytest.raises(DiskError, match="Stale file handle") as caught:
            pool.read(header(1), torch.zeros(SLOT, dtype=torch.uint8))
    assert caught.value.fatal and os.fstat is fstat


def test_a_directory_that_was_removed(shared: Pools) -> None:
    pool = shared.open()
    shared.put(pool, 1)
    pool.check().result()
    (base,) = shared.path.iterdir()
    base.rename(shared.path / "away")
    assert shared.get(pool, 1), "it is held by its descriptor"
    shutil.rmtree(shared.path / "away")
    assert not shared.get(pool, 1)
    with pytest.raises(DiskError) as caught:
        pool.check().result()
    assert caught.value.fatal
    with pytest.raises(DiskError) as caught:
        shared.put(pool, 2)
    assert caught.value.fatal


def test_a_directory_that_hangs_costs_its_time_limit_and_touches_nothing_later(
    shared: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, go, preadv = shared.open(limit_s=0.05), threading.Event(), os.preadv
    shared.put(shared.open(), 1)

    def hanging(*args: Any) -> int:
        go.wait(30)
        return preadv(*args)

    monkeypatch.setattr(os, "preadv", hanging)
    out = torch.full((SLOT,), 7, dtype=torch.uint8)
    with pytest.raises(DiskError, match=r"did not end within 0\.05 s") as caught:
        pool.read(header(1), out)
    assert caught.value.fatal and pool.counts["late"] == 1
    go.set()
    pool._limit_s = 30.0
    pool.close()  # when the late call has ended
    assert bool((out == 7).all()), "the late bytes went nowhere"


def test_a_directory_that_hangs_at_the_start_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()

    def hanging(*args: Any) -> Any:
        go.wait(30)
        raise OSError(errno.EIO, "late")

    monkeypatch.setattr("raykv.storage.fs_pool.OPEN_LIMIT_S", 0.05)
    monkeypatch.setattr("raykv.storage.fs_folder.open_base", hanging)
    pool = FsPool.open(str(tmp_path), 1 << 20, SLOT, limit_s=0.05)
    assert "does not answer" in pool.off
    with pytest.raises(DiskError, match="does not answer"):
        pool.read(header(1), torch.zeros(SLOT, dtype=torch.uint8))
    go.set()
    pool.close()


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EROFS])
def test_a_directory_that_is_broken_at_the_start_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def failing(*args: Any) -> Any:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("raykv.storage.fs_folder.open_base", failing)
    pool = FsPool.open(str(tmp_path), 1 << 20, SLOT)
    assert os.strerror(number) in pool.off
    pool.close()
