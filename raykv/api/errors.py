"""What the operators' API raises. All are RayKVErrors with one sentence that names the thing, its value and the fix."""

from __future__ import annotations

from raykv.errors import RayKVError


class OperationError(RayKVError):
    """An operation was refused; nothing was changed."""


class NotFoundError(OperationError):
    """There is no engine, store, node, child, tier, request or number of that name."""


class NotDoneError(OperationError):
    """An operation began and did not end as wanted; the message says what is left, and how to go on."""
