"""Recurrent cells as token mixers: what stood in the place of attention before it, and the fastest decoders of today.

With x the token, h the output and c the cell before it; sigma the logistic function, * elementwise:

    rnn   h' = tanh(W x + V h)                                                        (Elman 1990)
    lstm  i, f, g, o = W x + V h;  c' = sigma(f) * c + sigma(i) * tanh(g);  h' = sigma(o) * tanh(c')
                                                                                      (Hochreiter & Schmidhuber 1997)
    gru   r, z = sigma(W x + V h);  n = tanh(W_n x + r * (V_n h));  h' = (1 - z) * n + z * h     (Cho et al. 2014)
    ssru  f = sigma(W_f x);  c' = f * c + (1 - f) * W x;  h' = relu(c')               (Kim et al. 2019, section 3.1)

each W and V with its bias. All tokens go through W at once, so that only V, which ssru does without, is left to the
loop over the tokens. The orders of gates are PyTorch's.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .cache import State
from .packing import Packing

Cell = Callable[[Tensor, Tensor | None, State], State]


class Recurrent(nn.Module):
    """A cell read from left to right; the linears come from outside."""

    def __init__(self, *, inputs: nn.Module, recur: nn.Module | None, out: nn.Module | None, kind: str, units: int):
        """`inputs` (D -> G * U), `recur` (U -> G * U; None for ssru) and `out` (U -> D; None: the identity)."""
        super().__init__()
        self.inputs = inputs
        self.recur = recur
        self.out = out
        self.cell, self.states = CELLS[kind]
        self.units = units

    def forward(self, x: Tensor, packing: Packing) -> Tensor:
        """(N, D) -> (N, D)."""
        return self.start(x, packing)[0]

    def mix(self, x: Tensor, packing: Packing) -> Tensor:
        """The same without the last linear: the cell's outputs (N, U)."""
        return self._mix(x, packing)[0]

    def start(self, x: Tensor, packing: Packing) -> tuple[Tensor, State]:
        """`forward`, and the state (B, U) after each row's last token."""
        mixed, state = self._mix(x, packing)
        return self._projected(mixed), state

    def _mix(self, x: Tensor, packing: Packing) -> tuple[Tensor, State]:
        gates = packing.left_aligned(self.inputs(x))  # (B, T, G * U)
        lengths = packing.lengths[:, None]
        state: State = tuple(gates.new_zeros(len(gates), self.units) for _ in range(self.states))
        outputs = []
        for place, one in enumerate(gates.unbind(1)):
            new = self._cell(one, state)
            state = tuple(torch.where(place < lengths, n, old) for n, old in zip(new, state, strict=True))
            outputs.append(self._output(new))
        return packing.pack_left_aligned(torch.stack(outputs, 1)), state

    def step(self, x: Tensor, state: State, seen: Tensor) -> tuple[Tensor, State]:
        """One token a row (R, D) and what was before -> (R, D) and the state; `seen` is attention's concern."""
        new = self._cell(self.inputs(x), state)
        return self._projected(self._output(new)), new

    def _cell(self, gates: Tensor, state: State) -> State:
        return self.cell(gates, None if self.recur is None else self.recur(state[0]), state)

    def _output(self, state: State) -> Tensor:
        return state[0].relu() if self.recur is None else state[0]

    def _projected(self, outputs: Tensor) -> Tensor:
        return outputs if self.out is None else self.out(outputs)


def _rnn(gates: Tensor, back: Tensor | None, state: State) -> State:
    assert back is not None
    return ((gates + back).tanh(),)


def _lstm(gates: Tensor, back: Tensor | None, state: State) -> State:
    assert back is not None
    i, f, g, o = (gates + back).chunk(4, -1)
    cell = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * cell.tanh(), cell


def _gru(gates: Tensor, back: Tensor | None, state: State) -> State:
    assert back is not None
    (r, z, n), (back_r, back_z, back_n) = gates.chunk(3, -1), back.chunk(3, -1)
    new = (n + (r + back_r).sigmoid() * back_n).tanh()
    keep = (z + back_z).sigmoid()
    return ((1 - keep) * new + keep * state[0],)


def _ssru(gates: Tensor, back: Tensor | None, state: State) -> State:
    candidate, forget = gates.chunk(2, -1)
    keep = forget.sigmoid()
    return (keep * state[0] + (1 - keep) * candidate,)


CELLS: dict[str, tuple[Cell, int]] = {"rnn": (_rnn, 1), "lstm": (_lstm, 2), "gru": (_gru, 1), "ssru": (_ssru, 1)}
