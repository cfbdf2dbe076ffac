"""``python -m treeserve_speculator``."""

from treeserve_speculator.main import main

if __name__ == "__main__":
    main()
