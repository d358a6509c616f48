"""What operators use: `raykv.connect()` gives a `Cluster`. Importing this imports neither ray, torch nor vllm."""

from raykv.api.cluster import Cluster, connect
from raykv.api.errors import NotDoneError, NotFoundError, OperationError
from raykv.api.explanation import Explanation, Piece, Reason
from raykv.api.held import Pin, Quota, RunningOperation
from raykv.api.objects import Child, Engine, Listing, Node, Snapshot, Store, Tier
from raykv.api.results import Block, Found, Outcome, Part, Place, Progress, Run
from raykv.api.watching import Event, Rates, rates

__all__ = [
    "connect",
    "Cluster",
    "Node",
    "Engine",
    "Child",
    "Store",
    "Tier",
    "Snapshot",
    "Listing",
    "Found",
    "Block",
    "Place",
    "Run",
    "Explanation",
    "Piece",
    "Reason",
    "Outcome",
    "Part",
    "Progress",
    "Pin",
    "Quota",
    "RunningOperation",
    "Event",
    "Rates",
    "rates",
    "OperationError",
    "NotFoundError",
    "NotDoneError",
]
