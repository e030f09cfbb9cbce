import sys
from pathlib import Path

# The kernels' child processes import the helpers of this folder too, from beside their script.
sys.path.insert(0, str(Path(__file__).parent))
