"""The command line, `raykv`. Ray is imported only by what needs it."""

from raykv.cli import check, cluster, local, serve, status
from raykv.cli.base import main

__all__ = ["check", "cluster", "local", "main", "serve", "status"]
