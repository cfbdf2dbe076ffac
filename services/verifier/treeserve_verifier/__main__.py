"""`python -m treeserve_verifier`."""

import os

# Read by torch's OpenMP when it is loaded. Its own choice, to spin for milliseconds, stalls all threads of a forward
# pass as soon as another process wants a core; this bridges the gaps between operations and little more.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

from treeserve_verifier.main import main

main()
