"""The other process of these tests, run as a script: it gets a pickled handle and no more."""

import pickle
import sys
from pathlib import Path

import torch

from raykv.errors import RayKVError
from raykv.kvcache.share import export_kv_caches, open_kv_caches


def tensors(kv_caches):
    for value in kv_caches.values():
        yield from [value] if isinstance(value, torch.Tensor) else value


def say(word):
    print(word, flush=True)


def serve(kv_caches):
    """`sum` answers the sum over all tensors, `fill N` fills them, anything else ends."""
    for line in sys.stdin:
        command, *rest = line.split()
        if command == "sum":
            say(sum(float(t.double().sum()) for t in tensors(kv_caches)))
        elif command == "describe":
            say(
                [
                    (n, [(list(t.shape), t.stride(), str(t.dtype)) for t in tensors({n: v})])
                    for n, v in kv_caches.items()
                ]
            )
        elif command == "fill":
            for t in tensors(kv_caches):
                t.fill_(float(rest[0]))
            say("filled")
        else:
            return


def main(role, path):
    if role == "export":
        kv_caches = {f"layer.{i}": torch.zeros(16, 2, 8, 32) for i in range(4)}
        with export_kv_caches(kv_caches) as shared:
            Path(path).write_bytes(pickle.dumps(shared.handle))
            say("ready")
            serve(kv_caches)
        return 0
    try:
        mapped = open_kv_caches(pickle.loads(Path(path).read_bytes()))
    except RayKVError as error:
        say(f"{type(error).__name__}: {error}")
        return 1
    with mapped:
        say("ready")
        serve(mapped.kv_caches)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
