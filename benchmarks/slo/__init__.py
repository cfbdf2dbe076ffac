"""Service levels under load: treeserve beside first come first served, and beside fixed trees for everyone."""
