"""docs/api.md is what the docstrings say, and says something of everything."""

from __future__ import annotations

import inspect

from raykv import api
from scripts import api_docs


def test_the_page_is_up_to_date() -> None:
    assert api_docs.PAGE.read_text() == api_docs.render(), "run: python -m scripts.api_docs"


def test_everything_is_on_it() -> None:
    named = {name for _, names in api_docs.GROUPS for name in names}
    public = {name for name, _ in inspect.getmembers(api.Cluster) if not name.startswith("_")}
    assert public - named == {"address", "namespace"} and named <= public
    others = {"connect", "Cluster", "Listing", "rates", "OperationError", "NotFoundError", "NotDoneError"}
    assert set(api.__all__) - others == set(api_docs.RECORDS)


def test_everything_has_a_docstring() -> None:
    for name in api.__all__:
        assert inspect.getdoc(getattr(api, name)), name
    for name, member in inspect.getmembers(api.Cluster):
        assert name.startswith("_") or inspect.getdoc(member), name
