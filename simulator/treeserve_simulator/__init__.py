"""The router's and the verifiers' own policy code on a virtual clock: how latency and load behave at any scale."""
