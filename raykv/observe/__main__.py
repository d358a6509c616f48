"""`python -m raykv.observe PAGE`: bring the made parts of docs/metrics.md up to date."""

import sys
from pathlib import Path

from raykv.observe.docs import filled

page = Path(sys.argv[1])
page.write_text(filled(page.read_text()))
