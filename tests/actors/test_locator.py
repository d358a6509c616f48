"""Questions to the Directory: answered once, in time, and by nobody when there is none."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import pytest

from raykv.actors import locator as module
from raykv.actors.locator import NOBODY, Locator
from raykv.core.block_marks import pack_keys
from raykv.core.prefix import block_key
from raykv.directory_messages import Holder, Locate, Located, Publish
from raykv.errors import ClusterError
from raykv.store_messages import FINGERPRINT_NBYTES, HASH_NBYTES
from raykv.types import StoreLife
from tests.support.in_process_directory import InProcessDirectory
from tests.support.waiting import eventually

FP, HASH = bytes(FINGERPRINT_NBYTES), b"h" * HASH_NBYTES
WANTED = Locate((FP,), (0,), HASH, "")
FOUND = Located((Holder("a", "store", 1),))
PATIENCE = 30.0


def fill(directory: InProcessDirectory) -> None:
    assert directory.directory is not None
    batch = Publish("a", "store", StoreLife("life"), 0, 0, pack_keys([block_key(FP, 0, HASH)]))
    assert not directory.directory.publish(batch).again


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[InProcessDirectory]:
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(module, "LONGEST_PAUSE_S", 0.05)
    one = InProcessDirectory()
    fill(one)
    yield one
    one.close()


@pytest.fixture
def locator(directory: InProcessDirectory) -> Iterator[Locator]:
    one = Locator(directory)
    eventually(lambda: one.up)
    yield one
    one.close()


def ask(locator: Locator, timeout: float = PATIENCE, wanted: Locate = WANTED) -> Located:
    answers: queue.SimpleQueue[Located] = queue.SimpleQueue()
    locator.locate(wanted, timeout, answers.put)
    answer = answers.get(timeout=2 * PATIENCE)
    assert answers.empty()
    return answer


def test_a_question_is_answered(locator: Locator) -> None:
    assert ask(locator) == FOUND
    assert ask(locator, wanted=Locate((FP,), (0,), HASH, "a")) == NOBODY


def test_no_answer_in_time_is_nobody_and_a_late_one_is_nothing(locator: Locator, directory: InProcessDirectory) -> None:
    directory.hanging = True
    answers: list[Located] = []
    locator.locate(WANTED, PATIENCE, answers.append)
    assert ask(locator, timeout=0.05) == NOBODY, "also when it is asked after one with more time"
    eventually(lambda: len(directory._hung) == 2)
    assert answers == []
    directory.go_on()
    eventually(lambda: answers == [FOUND])
    eventually(lambda: len(directory.of("locate")) == 2)
    assert ask(locator) == FOUND


def test_without_a_directory_nobody_holds_anything_until_it_is_back(
    locator: Locator, directory: InProcessDirectory
) -> None:
    directory.die()
    assert ask(locator) == NOBODY
    eventually(lambda: not locator.up)
    assert ask(locator, timeout=1000.0) == NOBODY
    before = directory.found
    eventually(lambda: directory.found > before + 2)
    directory.come_back()
    fill(directory)
    eventually(lambda: locator.up)
    assert ask(locator) == FOUND


def test_a_question_that_raises_costs_itself_only(locator: Locator, directory: InProcessDirectory) -> None:
    assert ask(locator, wanted=Locate((FP,), (0,), b"x", "")) == NOBODY
    assert locator.up and directory.found == 1
    assert ask(locator) == FOUND


def test_a_search_that_fails_goes_on(directory: InProcessDirectory) -> None:
    tries: list[int] = []

    def find() -> object:
        tries.append(1)
        if len(tries) == 1:
            raise ClusterError("the head is away")
        if len(tries) == 2:
            raise RuntimeError("a defect")
        return directory()

    locator = Locator(find)  # type: ignore[arg-type]
    eventually(lambda: locator.up)
    assert ask(locator) == FOUND
    locator.close()


def test_open_questions_end_with_it(directory: InProcessDirectory) -> None:
    locator = Locator(directory)
    eventually(lambda: locator.up)
    directory.hanging = True
    answers: list[Located] = []
    locator.locate(WANTED, 1000.0, answers.append)
    locator.close()
    assert answers == [NOBODY]
    assert not any(thread.is_alive() for thread in (locator._threads[1],))


def test_many_threads_ask_at_once(locator: Locator) -> None:
    answers: queue.SimpleQueue[Located] = queue.SimpleQueue()

    def many() -> None:
        for _ in range(20):
            locator.locate(WANTED, PATIENCE, answers.put)

    threads = [threading.Thread(target=many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answers.get(timeout=PATIENCE) for _ in range(80)] == [FOUND] * 80
