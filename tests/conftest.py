"""What all tests share: one thread of torch, and helper modules importable as `conformance.laws`."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent))
pytest.register_assert_rewrite("conformance.laws")


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Small tests are fastest on one thread, and sums then have one order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
