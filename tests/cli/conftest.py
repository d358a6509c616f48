"""The command line over a cluster of fakes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner, Result

from raykv import api
from raykv.api import Cluster, store_ops
from raykv.cli import main
from tests.support.fake_operators import FakeWorld

Run = Callable[..., Result]


@pytest.fixture
def world() -> FakeWorld:
    return FakeWorld()


@pytest.fixture
def raykv(world: FakeWorld, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command; whatever it raises beside an exit is a failure of the test."""
    monkeypatch.setattr(store_ops, "POLL_S", 0.001)
    monkeypatch.setattr("raykv.api.chains.POLL_S", 0.001)
    monkeypatch.setattr(api, "connect", lambda address, namespace, timeout: Cluster(world, timeout))

    def run(*args: str, text: str | None = None) -> Result:
        done = CliRunner().invoke(main, list(args), input=text)
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return done

    return run


def said(result: Result) -> Any:
    """What a command printed as JSON."""
    return json.loads(result.stdout)
