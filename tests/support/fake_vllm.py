"""Stands for `vllm serve` where an engine's life is tested and not its work. Standard library only: starts in 50 ms.

    python fake_vllm.py MODEL --host H --port P [--grandchild] [--fail TEXT] [--delay S] [--busy N] [--deaf]
                                                [--fail-if FILE]

It answers /health, /metrics and, with its own arguments and environment, /about. `--fail`: print and exit 3.
`--grandchild`: start a process that ignores SIGTERM and sits in a session of its own, as vLLM's workers may.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

SLEEPER = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)"


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("model")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--kv-transfer-config")
    parser.add_argument("--fail")
    parser.add_argument("--fail-if")
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--busy", type=int, default=0)
    parser.add_argument("--grandchild", action="store_true")
    parser.add_argument("--deaf", action="store_true")
    options, rest = parser.parse_known_args()
    print(f"fake engine for {options.model}", flush=True)
    if options.fail or (options.fail_if and Path(options.fail_if).exists()):
        print(options.fail or "told to fail", file=sys.stderr, flush=True)
        return 3
    child = None
    if options.grandchild:
        child = subprocess.Popen([sys.executable, "-S", "-c", SLEEPER], start_new_session=True).pid
    signal.signal(signal.SIGTERM, signal.SIG_IGN if options.deaf else signal.SIG_DFL)
    time.sleep(options.delay)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            about = {"argv": sys.argv, "rest": rest, "environment": dict(os.environ), "child": child}
            pages = {
                "/health": b"",
                "/metrics": f'vllm:num_requests_running{{engine="0"}} {options.busy:.1f}\n'.encode(),
                "/about": json.dumps(about).encode(),
            }
            body = pages.get(self.path)
            self.send_response(200 if body is not None else 404)
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer((options.host, options.port), Handler)
    print("ready", flush=True)
    server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
