"""`raykv doctor`: what on this machine would keep RayKV from working."""

from __future__ import annotations

import sys
from typing import Any

import click

from raykv.cli.base import ERROR, command, out, plain
from raykv.cli.check import check_config
from raykv.cli.connected import ADDRESS, NAMESPACE, TIMEOUT

STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}


@command("doctor")
@click.argument("file", type=click.File(), required=False)
@ADDRESS
@NAMESPACE
@TIMEOUT
@click.option("--ray/--no-ray", default=True, show_default=True, help="Also look at the running cluster.")
@click.option("--disk", "folders", multiple=True, help="A folder of a disk tier; may be given several times.")
@click.option("--port", "ports", type=int, multiple=True, help="A port that is to be free; may be given several times.")
@click.option("--deep", is_flag=True, help="Also share GPU memory between processes: a minute, 3 GiB of GPU memory.")
def doctor_command(
    file: Any,
    address: str | None,
    namespace: str,
    timeout: float,
    ray: bool,
    folders: tuple[str, ...],
    ports: tuple[int, ...],
    deep: bool,
) -> dict[str, Any]:
    """Check this machine: versions, Ray, shared memory, CUDA, NIXL and UCX, ports, hash seed, disks.

    With a FILE (JSON, or - for standard input) also the --kv-transfer-config in it, and the folders of its disk tiers.
    Ends with 1 if something would keep RayKV from working; warnings don't count.
    """
    from raykv.api.doctor import Finding, Level, Wanted, examine
    from raykv.errors import RayKVError

    found: list[Finding] = []

    def told(finding: Finding) -> None:
        found.append(finding)
        style = STYLES[finding.level]
        out.print(f"[{style}]{finding.level:>7}[/]  {plain(finding.check)}: {plain(finding.said)}")
        if finding.fix:
            out.print(f"         [dim]{plain(finding.fix)}[/]")

    disks = list(folders)
    if file is not None:
        try:
            config = check_config(file)
            told(Finding("config", Level.OK, f"{len(config.children)} children"))
            disks += [path for path in _disk_folders(config) if path not in disks]
            address = address or config.ray_address
        except RayKVError as error:
            told(Finding("config", Level.ERROR, str(error)))
    for finding in examine(Wanted(address, namespace, ray, disks, ports, deep, timeout)):
        told(finding)
    counts = {level: sum(finding.level == level for finding in found) for level in Level}
    out.print(f"{counts[Level.ERROR]} errors, {counts[Level.WARNING]} warnings, {counts[Level.OK]} checks are well.")
    result = {"findings": [finding.to_dict() for finding in found], "errors": counts[Level.ERROR],
              "warnings": counts[Level.WARNING]}  # fmt: skip
    if counts[Level.ERROR]:
        click.get_current_context().call_on_close(lambda: sys.exit(ERROR))
    return result


def _disk_folders(config: Any) -> list[str]:
    """Of the disk tiers of its TierConnectors."""
    from raykv.config.tiers import parse_tiers

    found = []
    for child in config.children:
        if child.is_tier:
            found += [tier.path for tier in parse_tiers(child.extra).store.tiers if tier.path and tier.medium == "disk"]
    return found
