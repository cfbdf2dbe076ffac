"""What takes the place of transformers' modules gives a row the same bits beside any other rows, on any threads."""

import pytest
import torch
from support.tiny_families import tiny_reference
from torch import nn

from treeserve_engine.exact_modules import RowExactActivation, RowExactLinear, make_rows_exact

WIDTH = 172  # no whole number of vectors; 512 rows are cut between threads amid a row


@pytest.fixture(params=[1, 2, 3, 5], ids=lambda n: f"{n}-threads")
def _threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("function", [nn.SiLU(), nn.GELU(), nn.GELU(approximate="tanh"), nn.Sigmoid()], ids=str)
@torch.inference_mode()
def test_activations(function, dtype):
    exact = RowExactActivation(function)
    x = torch.randn(512, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)
    alone = torch.cat([exact(row) for row in x.split(1)])
    assert torch.equal(exact(x), alone)
    assert torch.equal(exact(x[None])[0], alone)
    torch.testing.assert_close(alone, function(x))


@torch.inference_mode()
def test_a_gate_of_one_output_stays_exact_through_what_follows():
    """Vector code would treat the gates of many rows together, and scalar code those that are left."""
    gate = RowExactLinear(torch.randn(1, 64, generator=torch.Generator().manual_seed(0)), None)
    x = torch.randn(1, 100, 64, generator=torch.Generator().manual_seed(1))
    alone = torch.cat([torch.sigmoid(gate(x[:, i : i + 1])) for i in range(100)], dim=1)
    assert torch.equal(torch.sigmoid(gate(x)), alone)


@torch.inference_mode()
def test_a_mixture_of_experts_computes_what_transformers_computes():
    model = tiny_reference("qwen3_moe")
    ids = torch.arange(3, 40)[None]
    expected = model(input_ids=ids, use_cache=False).logits
    tiles = make_rows_exact(model)
    assert tiles.sizes[0] == 4
    names = {type(module).__name__ for module in model.modules()}
    assert "Linear" not in names and "RowExactExperts" in names
    torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, expected, rtol=0, atol=1e-4)
