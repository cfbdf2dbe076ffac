"""Speculation on beside off at every concurrency and kind of task: is any of them slower?"""
