"""Fixtures of the kernel tests."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any
from unittest.mock import patch

import pytest
import torch


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Callable[..., Any]]:
    """Calls a test module's function in another process, in which Triton interprets its kernels on the CPU.

    Triton decides that once, when it is first imported; a process of its own keeps the other tests out of it.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        with patch.dict(os.environ, TRITON_INTERPRET="1"):
            pool.submit(torch.set_num_threads, 1).result()
        yield lambda function, *args: pool.submit(function, *args).result()
