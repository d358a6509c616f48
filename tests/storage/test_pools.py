"""Both pools: found again, locked, private, full, of another geometry; and the disk pool's own I/O."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from raykv.errors import DiskError, StorageError
from raykv.storage import disk_pool, host_pool
from raykv.storage.checksum import checksum, matches
from raykv.storage.disk_pool import DiskPool, aligned_buffer
from raykv.storage.headers import table_nbytes
from raykv.storage.host_pool import LEAST_ROOM, HostPool
from raykv.store_messages import KEY_NBYTES

pytestmark = pytest.mark.process

SLOTS, NBYTES = 6, 8192
KEY = bytes(range(KEY_NBYTES))
FILL = torch.Generator().manual_seed(0)


def data(nbytes: int = NBYTES) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=FILL)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Any]:
    """Opens host pools (in a plain folder: what matters is mmap) and closes them."""
    yield from opener(lambda slots=SLOTS, nbytes=NBYTES: HostPool.open(str(tmp_path / "pool"), slots, nbytes))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Any]:
    yield from opener(lambda slots=SLOTS, nbytes=NBYTES, **o: DiskPool.open(str(tmp_path / "d"), slots, nbytes, **o))


def opener(make: Any) -> Iterator[Any]:
    pools = []

    def start(*args: int, **options: int) -> Any:
        pools.append(make(*args, **options))
        return pools[-1]

    yield start
    for pool in pools:
        pool.close(remove=True)


@pytest.fixture(params=["host", "disk"])
def both(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def files(tmp_path: Path) -> list[Path]:
    return [path for path in tmp_path.rglob("*") if path.is_file()]


# -- both --------------------------------------------------------------------------------------------------


def test_a_pool_is_found_again(both: Any) -> None:
    pool = both()
    assert pool.recovered == []
    pool.headers.publish(2, KEY, 100, 7)
    pool.close(remove=False)
    assert [one[:4] for one in both().recovered] == [(2, KEY, 100, 7)]


def test_closed_and_removed_it_leaves_nothing(both: Any, tmp_path: Path) -> None:
    pool = both()
    pool.close(remove=True)
    pool.close(remove=True)
    assert files(tmp_path) == []


@pytest.mark.parametrize("change", [(SLOTS, 2 * NBYTES), (SLOTS // 2, 2 * NBYTES)])
def test_another_geometry_replaces_it(both: Any, change: tuple[int, int], caplog: pytest.LogCaptureFixture) -> None:
    pool = both()
    pool.headers.publish(2, KEY, 100, 7)
    pool.close(remove=False)
    pool = both(*change)
    assert pool.recovered == [] and "replaced" in caplog.text
    pool.close(remove=False)
    assert both().recovered == []


def test_a_second_opener_is_told_who_has_it(both: Any) -> None:
    both()
    with pytest.raises(StorageError, match=f"process {os.getpid()}"):
        both()


def test_files_are_this_users_alone(both: Any, tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        both()
    finally:
        os.umask(old)
    assert files(tmp_path)
    for path in files(tmp_path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_that_others_can_write_is_refused(both: Any, tmp_path: Path) -> None:
    both().close(remove=False)
    for path in files(tmp_path):
        path.chmod(0o666)
    with pytest.raises(StorageError, match="mode 666"):
        both()


def test_a_link_is_refused_and_its_target_untouched(both: Any, tmp_path: Path) -> None:
    pool = both()
    names = files(tmp_path)
    pool.close(remove=True)
    target = tmp_path / "precious"
    target.write_text("precious")
    for name in names:
        name.symlink_to(target)
    with pytest.raises(StorageError, match="symbolic link"):
        both()
    assert target.read_text() == "precious"
    for name in names:
        name.unlink()


def test_a_full_medium_is_an_error_with_figures_and_leaves_nothing(
    both: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StorageError, match=r"needs \d+ bytes .* has \d+ free. Give the (host|disk) tier"):
        both()
    assert files(tmp_path) == []
    monkeypatch.undo()
    both()


def test_a_cut_file_is_replaced(both: Any, tmp_path: Path) -> None:
    pool = both()
    pool.headers.publish(0, KEY, 100, 7)
    pool.close(remove=False)
    for path in files(tmp_path):
        os.truncate(path, path.stat().st_size - 4096)
    assert both().recovered == []
    for path in files(tmp_path):
        hole = LEAST_ROOM * 128 if path.name == "pool" else 0  # in the table of a host pool
        assert path.stat().st_blocks * 512 >= path.stat().st_size - hole, "reserved in full"


# -- another number of slots -----------------------------------------------------------------------------------


def fill(pool: Any, slots: int) -> dict[bytes, bytes]:
    """A block in each of the first slots."""
    written = {}
    for slot in range(slots):
        block, key = data(), bytes([slot + 1]) * KEY_NBYTES
        if isinstance(pool, HostPool):
            pool.slots[slot] = block
        else:
            pool.write(slot, block)
        pool.headers.publish(slot, key, NBYTES, checksum(block))
        written[key] = block.numpy().tobytes()
    return written


def kept(pool: Any) -> dict[bytes, bytes]:
    """What a pool that was opened has recovered, each byte."""
    found = {}
    for one in pool.recovered:
        row = aligned_buffer(NBYTES)
        if isinstance(pool, HostPool):
            row.copy_(pool.slots[one.slot])
        else:
            pool.read(one.slot, NBYTES, row)
        assert matches(row, one.checksum)
        found[one.key] = row.numpy().tobytes()
    return found


@pytest.mark.parametrize("slots", [1, SLOTS - 1, SLOTS + 1, 40, 200])
def test_a_pool_keeps_what_fits_into_another_number_of_slots(both: Any, slots: int) -> None:
    """In place, and when it is opened with that number."""
    pool = both()
    written = fill(pool, SLOTS)
    pool.close(remove=False)
    pool = both(slots)
    assert kept(pool) == dict(list(written.items())[:slots])
    pool.close(remove=False)
    pool = both(SLOTS)
    stays = dict(list(written.items())[: min(slots, SLOTS)])
    assert kept(pool) == stays, "what was beyond the end did not come back"
    for slot in range(slots, SLOTS):
        pool.headers.clear(slot)
    pool.resize(slots)
    assert pool.headers.slots == slots
    pool.close(remove=False)
    assert kept(both(slots)) == stays


def test_slots_keep_their_address_and_new_ones_hold_nothing(host: Any) -> None:
    pool = host()
    fill(pool, SLOTS)
    before, generation = pool.slots, pool.headers.read(SLOTS - 1).generation
    pool.resize(50)
    assert pool.slots.data_ptr() == before.data_ptr() and pool.slots.shape == (50, NBYTES)
    assert before[0].equal(pool.slots[0])
    assert pool.slots[SLOTS:].sum() == 0 and pool.headers.read(49).state == 0
    pool.headers.publish(49, KEY, 1, 1)
    assert pool.headers.read(49).generation > generation
    pool.headers.clear(49)
    pool.resize(2)
    pool.resize(SLOTS)
    assert pool.headers.read(4).state == 0 and pool.slots[4].sum() == 0


def test_what_is_given_back_is_given_back(both: Any, tmp_path: Path) -> None:
    pool = both()
    before = sum(path.stat().st_blocks for path in files(tmp_path))
    pool.resize(100)
    more = sum(path.stat().st_blocks for path in files(tmp_path))
    assert (more - before) * 512 >= (100 - SLOTS) * NBYTES
    pool.resize(SLOTS)
    after = sum(path.stat().st_blocks for path in files(tmp_path))
    assert (after - before) * 512 <= 100 * 128 + 4096, "a table stays as long as it was"


def test_no_room_to_grow_changes_nothing(both: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = both()
    written = fill(pool, SLOTS)

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    sizes = [path.stat().st_size for path in files(tmp_path)]
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StorageError, match=r"needs \d+ bytes .* more, and .* has \d+ free"):
        pool.resize(100)
    assert [path.stat().st_size for path in files(tmp_path)] == sizes
    pool.close(remove=False)
    assert kept(both()) == written


def test_a_pool_grows_to_what_its_table_has_room_for(host: Any) -> None:
    pool = host()
    assert "can grow to" in pool.why_not(10**6)
    with pytest.raises(StorageError, match="start it anew"):
        pool.resize(10**6)
    with pytest.raises(StorageError, match="at least one slot"):
        pool.resize(0)


def test_pieces_that_others_know_stay_whole(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pool, "PIECE_NBYTES", 4 * NBYTES)
    pool = host(10)
    assert [piece.nbytes // NBYTES for piece in pool.pieces] == [4, 4, 2]
    pool.tell()
    pieces = pool.pieces
    assert pool.plan(5) == ([], pieces[2:])
    pool.resize(5)
    assert pool.pieces == pieces[:2], "two pieces for five slots: the second one is known as it is"
    assert pool.plan(8) == ([], [])
    pool.resize(8)
    added, dropped = pool.plan(13)
    assert ([piece.nbytes // NBYTES for piece in added], dropped) == ([4, 1], [])
    pool.resize(13)
    assert pool.pieces == [*pieces[:2], *added]
    pool.slots.fill_(1)


@pytest.mark.parametrize("geometry", [(0, NBYTES), (SLOTS, 0), (SLOTS, 5000)])
def test_an_impossible_geometry_is_an_error(both: Any, geometry: tuple[int, int]) -> None:
    with pytest.raises(StorageError, match="multiple of 4096"):
        both(*geometry)


def test_a_file_removed_before_the_lock_is_not_used(both: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last owner removed it between our open and our lock: a second store would get its own file."""
    real, calls = fcntl.flock, []

    def late(fd: int, how: int) -> None:
        if not calls:
            os.unlink(os.readlink(f"/proc/self/fd/{fd}"))
        calls.append(fd)
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    both()
    assert len(calls) == 2
    monkeypatch.undo()
    with pytest.raises(StorageError, match="in use"):
        both()


# -- host --------------------------------------------------------------------------------------------------


def test_slots_are_whole_pages_and_keep_their_bytes(host: Any) -> None:
    pool = host()
    assert pool.slots.shape == (SLOTS, NBYTES) and pool.slots.data_ptr() % 4096 == 0
    rows = torch.stack([data() for _ in range(SLOTS)])
    pool.slots.copy_(rows)
    pool.headers.publish(SLOTS - 1, KEY, NBYTES, checksum(rows[-1]))
    pool.close(remove=False)
    pool = host()
    assert torch.equal(pool.slots, rows), "the table does not reach into the slots"
    (found,) = pool.recovered
    assert matches(pool.slots[found.slot], found.checksum)


def test_a_view_that_was_kept_keeps_the_lock(host: Any, tmp_path: Path) -> None:
    pool = host()
    row = pool.slots[1]
    row.fill_(5)
    pool.close(remove=False)
    with pytest.raises(StorageError, match="in use"):
        host()
    assert row.sum() == 5 * NBYTES
    del row
    host()


# -- disk --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 5000, NBYTES])
@pytest.mark.parametrize("aligned", [True, False])
def test_what_is_written_is_read(
    disk: Any, nbytes: int, aligned: bool, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not direct:
        refuse_direct(monkeypatch)
    pool = disk()
    neighbours = data()
    for slot in range(SLOTS):
        pool.write(slot, neighbours)
    block = aligned_buffer(NBYTES) if aligned else torch.zeros(NBYTES + 3, dtype=torch.uint8)[3:]
    block[:nbytes] = data(nbytes)
    pool.write(2, block[:nbytes])
    out = aligned_buffer(NBYTES) if aligned else torch.zeros(nbytes + 1, dtype=torch.uint8)[1:]
    pool.read(2, nbytes, out)
    assert torch.equal(out[:nbytes], block[:nbytes])
    for slot in (1, 3):
        pool.read(slot, NBYTES, other := aligned_buffer(NBYTES))
        assert torch.equal(other, neighbours)


def refuse_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: str, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *mode)

    monkeypatch.setattr(os, "open", refuse)


def test_without_o_direct_it_says_so_once(
    disk: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refuse_direct(monkeypatch)
    pool = disk()
    assert not pool.direct and caplog.text.count("O_DIRECT") == 1


@pytest.mark.parametrize(
    ("number", "fatal"),
    [(errno.EROFS, True), (errno.EIO, True), (errno.ENOSPC, True), (errno.ESTALE, True), (errno.EINVAL, False)],
)
def test_an_error_says_whether_the_disk_is_gone(
    disk: Any, number: int, fatal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = disk()

    def fail(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    for name in ("pwrite", "preadv", "fdatasync"):
        monkeypatch.setattr(disk_pool.os, name, fail)
    for call in (lambda: pool.write(0, data()), lambda: pool.read(0, 9, aligned_buffer(9)), pool.sync):
        with pytest.raises(DiskError, match=os.strerror(number)) as caught:
            call()
        assert caught.value.fatal is fatal
    monkeypatch.undo()
    pool.write(0, block := data())
    pool.read(0, NBYTES, out := aligned_buffer(NBYTES))
    assert torch.equal(out, block), "and each call gave its turn back"


@pytest.mark.parametrize("direct", [True, False])
def test_short_reads_and_writes_go_on(disk: Any, direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not direct:
        refuse_direct(monkeypatch)
    pool = disk(nbytes=4 * NBYTES)
    block, out = data(4 * NBYTES), aligned_buffer(4 * NBYTES)
    read, write, calls, offsets = os.preadv, os.pwrite, [], set()

    def short(count: int, at: int) -> int:  # 8192 bytes are moved, an odd number is reported
        calls.append(at)
        offsets.add(at % 4096)
        return min(count, 5000)

    monkeypatch.setattr(disk_pool.os, "pwrite", lambda fd, b, at: short(write(fd, b[:8192], at), at))
    monkeypatch.setattr(disk_pool.os, "preadv", lambda fd, bs, at: short(read(fd, [bs[0][:8192]], at), at))
    pool.write(1, block)
    pool.read(1, 4 * NBYTES, out)
    assert torch.equal(out, block) and len(calls) >= 8
    assert not pool.direct or offsets == {0}


@pytest.mark.parametrize("size", [NBYTES, NBYTES + 4096, NBYTES + 100])
@pytest.mark.parametrize("direct", [True, False])
def test_a_cut_file_is_one_bad_block(
    disk: Any, size: int, direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not direct:
        refuse_direct(monkeypatch)
    pool = disk()
    pool.write(0, block := data())
    os.truncate(tmp_path / "d" / "raykv.slots", size)
    with pytest.raises(DiskError, match="was it cut") as caught:
        pool.read(1, NBYTES, aligned_buffer(NBYTES))
    assert not caught.value.fatal
    pool.read(0, NBYTES, out := aligned_buffer(NBYTES))
    assert torch.equal(out, block)


def test_no_more_calls_at_work_than_the_queue_is_deep(disk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, write = disk(queue_depth=2), os.pwrite
    gate, inside, most, lock = threading.Barrier(2), [0], [0], threading.Lock()

    def counted(fd: int, buffer: Any, at: int) -> int:
        with lock:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
        gate.wait(timeout=30)  # two must be in here at once, or it breaks
        with lock:
            inside[0] -= 1
        return write(fd, buffer, at)

    monkeypatch.setattr(disk_pool.os, "pwrite", counted)
    blocks = [data() for _ in range(SLOTS)]
    threads = [threading.Thread(target=pool.write, args=pair) for pair in enumerate(blocks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [2]
    for slot, block in enumerate(blocks):
        pool.read(slot, NBYTES, out := aligned_buffer(NBYTES))
        assert torch.equal(out, block)


def test_a_closed_pool_says_so(disk: Any) -> None:
    pool = disk()
    pool.sync()
    pool.close(remove=False)
    with pytest.raises(StorageError, match="closed"):
        pool.read(0, 5, aligned_buffer(5))


def test_what_can_not_be_is_an_error(disk: Any) -> None:
    pool = disk()
    for slot in (-1, SLOTS):
        with pytest.raises(IndexError):
            pool.write(slot, data())
    with pytest.raises(ValueError):
        pool.write(0, data(NBYTES + 1))
    with pytest.raises(ValueError):
        pool.read(0, 100, aligned_buffer(99))
    with pytest.raises(ValueError):
        pool.write(0, torch.zeros(8, dtype=torch.int64))


# -- corruption --------------------------------------------------------------------------------------------


def test_no_corruption_is_recovered_and_verified(host: Any, tmp_path: Path) -> None:
    """1000 times: flips in data or headers, zeroed pages, blocks and headers in another's place."""
    dice, path = random.Random(3), tmp_path / "pool"
    pool = host(8, 4096)
    written = {}
    for slot in range(8):
        pool.slots[slot] = data(4096)
        key = bytes([slot]) * KEY_NBYTES
        pool.headers.publish(slot, key, 4000, checksum(pool.slots[slot, :4000]))
        written[key] = bytes(pool.slots[slot, :4000].numpy())
    pool.close(remove=False)
    gap = table_nbytes(LEAST_ROOM) - table_nbytes(8)  # in the file, between the headers that are and the slots
    whole, start = path.read_bytes(), table_nbytes(8)
    whole = whole[:start] + whole[start + gap :]
    lost = 0
    for _ in range(1000):
        image = bytearray(whole)
        kind = dice.randrange(5)
        here, there = dice.sample(range(8), 2)
        if kind == 0:
            image[start + here * 4096 + dice.randrange(4000)] ^= 1 << dice.randrange(8)
        elif kind == 1:
            image[4096 + here * 128 + dice.randrange(128)] ^= 1 << dice.randrange(8)
        elif kind == 2:
            cut = start + here * 4096 + dice.randrange(4000)
            image[cut : start + (here + 1) * 4096] = bytes(start + (here + 1) * 4096 - cut)
        elif kind == 3:
            image[start + here * 4096 : start + (here + 1) * 4096] = whole[start + there * 4096 :][:4096]
        else:
            image[4096 + here * 128 : 4096 + (here + 1) * 128] = whole[4096 + there * 128 :][:128]
        with path.open("r+b") as file:
            file.write(image[:start])
            file.seek(start + gap)
            file.write(image[start:])
        pool = host(8, 4096)
        good = [r for r in pool.recovered if matches(pool.slots[r.slot, : r.nbytes], r.checksum)]
        for recovered in good:
            assert bytes(pool.slots[recovered.slot, : recovered.nbytes].numpy()) == written[recovered.key]
        lost += 8 - len(good)
        pool.close(remove=False)
    assert lost >= 1000, "each corruption was seen"
