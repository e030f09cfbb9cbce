"""The scripts import one another by name, as they do when one of them is run."""

import sys
from pathlib import Path

SCRIPTS = str(Path(__file__).parents[2] / "scripts")

if SCRIPTS not in sys.path:
    sys.path.append(SCRIPTS)
