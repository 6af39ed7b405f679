import pytest
import torch

from slimformer.transformer.dropout import Dropout


@pytest.mark.parametrize(("rate", "bytes_dropped"), [(0.1, 26), (0.25, 64), (0.5, 128), (0.999, 255), (0.0001, 1)])
def test_the_share_of_zeros_is_the_nearest_of_256_and_the_mean_stays(rate: float, bytes_dropped: int) -> None:
    torch.manual_seed(0)
    dropout = Dropout(rate).train()
    dropped = dropout(torch.ones(1000, 1003))
    kept = 256 - bytes_dropped
    deviation = (bytes_dropped * kept / 256**2 / dropped.numel()) ** 0.5
    assert abs(float((dropped == 0).double().mean()) - bytes_dropped / 256) < 5 * deviation
    assert set(dropped.unique().tolist()) == {0.0, float(torch.tensor(256 / kept))}


def test_the_gradient_goes_where_the_values_went() -> None:
    torch.manual_seed(0)
    x = torch.full((7, 13), 2.0, requires_grad=True)
    y = Dropout(0.5).train()(x)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad * 2, y)
    assert 0 < int((x.grad == 0).sum()) < x.numel()


def test_every_column_and_row_is_dropped_alike() -> None:
    torch.manual_seed(1)
    zeros = (Dropout(0.5).train()(torch.ones(4096, 64)) == 0).double()
    assert zeros.mean(0).sub(0.5).abs().max() < 5 * 0.5 / 64  # five deviations of a mean of 4096
    assert zeros.mean(1).sub(0.5).abs().max() < 6 * 0.5 / 8
    neighbours = (zeros[:, 1:] * zeros[:, :-1]).mean()
    assert abs(float(neighbours) - 0.25) < 0.005


def test_seeded_and_absent_outside_training() -> None:
    dropout, x = Dropout(0.3), torch.ones(3, 5)
    assert dropout.eval()(x) is x
    assert Dropout(0.0).train()(x) is x
    dropout.train()
    torch.manual_seed(5)
    first = dropout(x)
    torch.manual_seed(5)
    assert torch.equal(dropout(x), first)
    assert not torch.equal(dropout(x), first)


def test_nothing_is_dropped_of_nothing() -> None:
    assert Dropout(0.3).train()(torch.ones(0, 4)).shape == (0, 4)
