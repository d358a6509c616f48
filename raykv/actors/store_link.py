"""An engine's two links to the store of its node."""

from raykv.actors.store_asker import StoreAsker
from raykv.actors.store_call import OpenStore, StoreCaller, StoreProcess
from raykv.actors.store_worker_link import StoreWorkerLink

__all__ = ["OpenStore", "StoreAsker", "StoreCaller", "StoreProcess", "StoreWorkerLink"]
