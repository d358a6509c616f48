"""Ends what a test run started when that run is killed and can't do it itself.

One process per run, standard library only. It reads lines from a pipe whose other end only the run holds: `+N` and
`-N` for a session that came and went. At the pipe's end it kills whatever is left of the sessions.
"""

from __future__ import annotations

import os
import signal
import sys


def session_of(pid: int) -> int | None:
    """The session of a living process; None for one that is gone or a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            # after the command's closing parenthesis: state, parent, group, session
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[3])


def main() -> None:
    sessions: set[int] = set()
    with os.fdopen(int(sys.argv[1])) as lines:
        for line in lines:
            change = sessions.add if line.startswith("+") else sessions.discard
            change(int(line[1:]))
    while left := [int(p) for p in os.listdir("/proc") if p.isdigit() and session_of(int(p)) in sessions]:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


if __name__ == "__main__":
    main()
