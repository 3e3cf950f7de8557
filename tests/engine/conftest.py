"""Lets the files of this folder import each other, in tests as in workers."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
