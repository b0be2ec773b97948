"""Makes the programs in `docs` importable."""

import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"
sys.path += [str(DOCS), str(DOCS / "developers")]
