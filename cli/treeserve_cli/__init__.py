"""The treeserve command."""
