"""The nouns of treeserve: token trees, sampling parameters, outcomes. Only numpy and the standard library."""
