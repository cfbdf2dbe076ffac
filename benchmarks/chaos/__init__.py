"""Kills, drains and pauses the processes of a running cluster, and compares every output with an undisturbed one."""
