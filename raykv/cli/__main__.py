"""`python -m raykv.cli`."""

from raykv.cli import main

main(prog_name="raykv")
