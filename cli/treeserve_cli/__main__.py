"""`python -m treeserve_cli`, the same as `treeserve`."""

from treeserve_cli.main import app

app()
