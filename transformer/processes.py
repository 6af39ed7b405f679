"""The processes that train a model together: one, or as many as `accelerate launch` starts, here or on many machines.

All run the same training over the same batches and know whose part of a batch is whose (`parts`): nothing but gradients
and the rows that a loss wants of others goes between them. The first of them, the main process, writes; the others have
to see its files.
"""

import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .errors import InputError

LAUNCHED = ("LOCAL_RANK", "ACCELERATE_MIXED_PRECISION")  # variables that a launcher sets
PATIENCE = timedelta(days=2)  # of the others, while the main process prunes, exports and measures

T = TypeVar("T")


class Processes:
    """One process by itself.

    Attributes:
        number: of processes.
        rank: of this one, from 0.
    """

    number = 1
    rank = 0

    @property
    def main(self) -> bool:
        """Whether this is the one that writes."""
        return self.rank == 0

    def begin(self, module: nn.Module, optimizer: torch.optim.Optimizer, *, idle: bool) -> tuple[nn.Module, Any]:
        """The module, whose gradients are from now on the mean over processes, and its optimizer.

        Args:
            module: its forward pass gives a loss.
            optimizer: of its parameters.
            idle: whether there are parameters without a gradient.
        """
        return module, optimizer

    def end(self) -> None:
        """Let go of what `begin` was given."""

    def holding(self, module: nn.Module) -> AbstractContextManager[None]:
        """Within, gradients add up and stay here: for all parts of a step but its last."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of this process's share of a loss."""
        loss.backward()  # type: ignore[no-untyped-call]

    def clip(self, parameters: Iterable[nn.Parameter], limit: float) -> Tensor:
        """Scale gradients to a norm of `limit` at most; the norm before."""
        return nn.utils.clip_grad_norm_(parameters, limit)

    def gathered(self, rows: Tensor) -> list[Tensor]:
        """Rows (n, ...) of each process, n its own."""
        return [rows]

    def totals(self, values: Sequence[float]) -> list[float]:
        """Sums over processes."""
        return list(values)

    def all_of(self, value: T) -> list[T]:
        """The value of each process; it can be pickled."""
        return [value]

    def from_main(self, value: T) -> T:
        """The main process's value; it can be pickled."""
        return value

    def main_first(self) -> AbstractContextManager[None]:
        """Within, the main process goes first: the others find what it has left on disk."""
        return nullcontext()


ALONE = Processes()


class Launched(Processes):
    """What `accelerate launch` or torchrun has started."""

    def __init__(self, device: str) -> None:
        """Join the others.

        Raises:
            InputError: accelerate is not installed, or asked for a way to train that is not offered.
        """
        try:
            from accelerate import Accelerator
            from accelerate.utils import DistributedDataParallelKwargs, DistributedType, InitProcessGroupKwargs
        except ImportError as error:
            raise InputError("several processes need accelerate: pip install slimformer[distributed]") from error
        handlers = [InitProcessGroupKwargs(timeout=PATIENCE), DistributedDataParallelKwargs()]
        self.accelerator: Any = Accelerator(cpu=device == "cpu", kwargs_handlers=handlers)
        kinds = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
        if self.accelerator.distributed_type not in kinds:
            raise InputError(
                f"accelerate is to train by {self.accelerator.distributed_type.value}, which slimformer does not: "
                "choose data-parallel processes, each with the whole model (accelerate config)"
            )
        self.number, self.rank = self.accelerator.num_processes, self.accelerator.process_index

    def begin(self, module: nn.Module, optimizer: torch.optim.Optimizer, *, idle: bool) -> tuple[nn.Module, Any]:
        """See `Processes`."""
        self.accelerator.ddp_handler.find_unused_parameters = idle
        module, optimizer = self.accelerator.prepare(module, optimizer)
        return module, optimizer

    def end(self) -> None:
        """See `Processes`."""
        self.accelerator.free_memory()

    def holding(self, module: nn.Module) -> AbstractContextManager[None]:
        """See `Processes`."""
        held: AbstractContextManager[None] = self.accelerator.no_sync(module)
        return held

    def backward(self, loss: Tensor) -> None:
        """See `Processes`; what the processes' gradients come to is a mean, what they are to come to is a sum."""
        self.accelerator.backward(loss * self.number)

    def clip(self, parameters: Iterable[nn.Parameter], limit: float) -> Tensor:
        """See `Processes`."""
        norm: Tensor = self.accelerator.clip_grad_norm_(parameters, limit)
        return norm

    def gathered(self, rows: Tensor) -> list[Tensor]:
        """See `Processes`."""
        sizes = self.accelerator.gather(torch.tensor([len(rows)], device=rows.device)).tolist()
        padded = rows.new_zeros((max(sizes), *rows.shape[1:]))
        padded[: len(rows)] = rows
        parts = self.accelerator.gather(padded).split(max(sizes)) if max(sizes) else [padded] * len(sizes)
        return [part[:size] for part, size in zip(parts, sizes, strict=True)]

    def totals(self, values: Sequence[float]) -> list[float]:
        """See `Processes`."""
        own = torch.tensor(values, dtype=torch.float64, device=self.accelerator.device)
        totals: list[float] = self.accelerator.reduce(own, "sum").tolist()
        return totals

    def all_of(self, value: T) -> list[T]:
        """See `Processes`."""
        from accelerate.utils import gather_object

        return list(gather_object([value]))

    def from_main(self, value: T) -> T:
        """See `Processes`."""
        from accelerate.utils import broadcast_object_list

        held = [value]
        broadcast_object_list(held)
        return held[0]

    def main_first(self) -> AbstractContextManager[None]:
        """See `Processes`."""
        first: AbstractContextManager[None] = self.accelerator.main_process_first()
        return first


def launched(device: str) -> Processes:
    """The processes that this one is among, on a kind of device ("cpu", "cuda"): ALONE where nothing launched it."""
    return Launched(device) if any(name in os.environ for name in LAUNCHED) else ALONE
