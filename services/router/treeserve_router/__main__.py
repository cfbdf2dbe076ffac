"""`python -m treeserve_router`."""

from treeserve_router.main import main

main()
