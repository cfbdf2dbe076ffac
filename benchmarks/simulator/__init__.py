"""The simulator beside a real run on this machine, and the same systems at a scale that no machine here has."""
