"""What `up` finds out before it joins a cluster."""

from __future__ import annotations

import json
import sys

import pytest

from raykv import router
from raykv.actors import cluster
from raykv.errors import ConfigError
from raykv.launch import up as launch
from raykv.launch.spec_file import spec_from

pytestmark = pytest.mark.process


@pytest.mark.parametrize("missing", ["ray.serve", "raykv.router.app"])
def test_a_router_that_is_not_installed(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found out at once, and not when all engines are ready."""
    monkeypatch.delattr(router, "app", raising=False)  # it may have been imported before
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.setattr(cluster, "connect", lambda *_, **__: pytest.fail("it went on"))
    wanted = spec_from(json.dumps({"model": "m", "engines": [{"name": "e"}], "router": {}}))
    with pytest.raises(ConfigError, match=r"pip install 'raykv\[router\]'"):
        launch.up(wanted, lambda line: None)
