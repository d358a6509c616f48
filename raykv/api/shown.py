"""How the API's objects are shown: as a rich table, as plain values for JSON."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from rich.console import RenderableType

T = TypeVar("T")


def plain(value: Any) -> Any:
    """The same as JSON has it: records as objects, bytes in hexadecimal, enums by their value."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, bytes):
        return value.hex()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in (sorted(value) if isinstance(value, set | frozenset) else value)]
    return value


def escape(text: object) -> str:
    """Text of others for a rich table: a bracket in it is no markup."""
    return str(text).replace("[", r"\[")


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str = "") -> Any:
    """A rich table without lines. Cells are text of others: no markup. Figures stand at the right."""
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, title=title or None, title_justify="left", pad_edge=False)
    for column in columns:
        made.add_column(column.removesuffix("#"), justify="right" if column.endswith("#") else "left", overflow="fold")
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    return made


class Shown:
    """A record that shows itself."""

    def to_dict(self) -> dict[str, Any]:
        """All its fields as plain values, fit for `json.dumps`."""
        found: dict[str, Any] = plain(self)
        return found

    def __rich__(self) -> RenderableType:
        return table(("", ""), [(name, value) for name, value in self.to_dict().items()])


class Listing(tuple[T, ...]):
    """A tuple of such records; `rich.print` shows it as one table."""

    def to_dict(self) -> list[Any]:
        """Each one's `to_dict`."""
        return [plain(one) if not isinstance(one, Shown) else one.to_dict() for one in self]

    def __rich__(self) -> RenderableType:
        from rich.text import Text

        if not self:
            return Text("none", style="dim")
        first: Any = self[0]
        columns = getattr(first, "COLUMNS", None)
        if columns is None:
            return Text("\n".join(map(str, self)))
        return table(columns, [one.row() for one in self])  # type: ignore[attr-defined]
