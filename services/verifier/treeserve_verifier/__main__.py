"""`python -m treeserve_verifier`."""

from treeserve_verifier.main import main

main()
