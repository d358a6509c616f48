"""What crosses from one process of an engine to another arrives as it was, tensors in metadata above all."""

from __future__ import annotations

import pickle

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnectorMetadata

from raykv.connector.metadata import dump, load

pytestmark = pytest.mark.vllm

WHOLE = torch.arange(24).reshape(4, 6)
TENSORS = {
    "int64": torch.arange(1008),
    "bool": torch.tensor([True, False]),
    "bfloat16": torch.randn(3, 5).to(torch.bfloat16),
    "complex": torch.randn(2, 2, dtype=torch.complex64),
    "scalar": torch.tensor(7),
    "empty": torch.empty(0, 3),
    "part": WHOLE[1],
    "column": WHOLE[:, 1],
    "transposed": WHOLE.t(),
    "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
    "gradient": torch.randn(3, requires_grad=True),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "sparse": torch.eye(3).to_sparse(),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_arrive_as_they_were(name: str) -> None:
    tensor = TENSORS[name]
    found = load(dump({"t": tensor, "same": tensor}))
    assert type(found["t"]) is type(tensor) and found["t"] is found["same"]
    assert (found["t"].dtype, found["t"].shape) == (tensor.dtype, tensor.shape)
    assert found["t"].requires_grad == tensor.requires_grad
    assert torch.equal(found["t"].to_dense(), tensor.to_dense())


def test_what_arrives_may_be_changed() -> None:
    found = load(dump(TENSORS["int64"]))
    found[0] = 5
    assert found[0] == 5 and TENSORS["int64"][0] == 0


def test_metadata_with_tensors_is_smaller_than_with_torchs_own_pickle() -> None:
    meta = ExampleConnectorMetadata()
    meta.add_request(list(range(100)), list(range(7)), 16, False, ["m"])
    data = dump(meta)
    assert len(data) < len(pickle.dumps(meta))
    (request,) = load(data).requests
    assert torch.equal(request.token_ids, meta.requests[0].token_ids)
    assert torch.equal(request.slot_mapping, meta.requests[0].slot_mapping)
    assert (request.is_store, request.mm_hashes) == (False, ["m"])
