"""How writing is taught, to translators, summarizers and language models alike."""

from dataclasses import dataclass

from .errors import InputError
from .training_options import FLOAT32, TrainingOptions, loop_options, one_budget

EPOCHS = 10


@dataclass(frozen=True)
class Teaching:
    """How to teach.

    Attributes:
        epochs, steps, minutes: how long, by one of them; `EPOCHS` passes over train where none is given.
        lr: peak learning rate.
        warmup: optimizer steps of linear warm-up (at most a tenth of all).
        schedule: of the learning rate after it, as in `TrainingOptions`.
        batch_tokens: greatest number of tokens of a batch, of pairs both sides together.
        dropout: of embeddings and sub-layers.
        smoothing: share of the loss's weight that lies on all tokens evenly (Szegedy et al. 2016, section 7).
        weight_decay, clip: as in `TrainingOptions`.
        valid_texts: texts of valid that a translator or summarizer writes for after an epoch.
        precision: of products, as in `TrainingOptions`.
        seed: of dropout and the order of the examples.
    """

    epochs: int | None = None
    steps: int | None = None
    minutes: float | None = None
    lr: float = 1e-3
    warmup: int = 250
    schedule: str = "inverse_sqrt"
    batch_tokens: int = 2000
    dropout: float = 0.1
    smoothing: float = 0.1
    weight_decay: float = 0.01
    clip: float = 1.0
    valid_texts: int = 500
    precision: str = FLOAT32
    seed: int = 0

    def __post_init__(self) -> None:
        problems = one_budget(self)
        for name in ("epochs", "batch_tokens", "valid_texts"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                problems.append(f"{name} is {getattr(self, name)}, not at least 1")
        for name in ("dropout", "smoothing"):
            if not 0 <= getattr(self, name) < 1:
                problems.append(f"{name} is {getattr(self, name)}, not from 0 to below 1")
        if problems:
            raise InputError("training: " + "; ".join(problems))
        self.training(1)

    def training(self, epochs_steps: int) -> TrainingOptions:
        """The loop's options; `epochs_steps` is the number of steps of all epochs, if it is they that count."""
        return loop_options(self, epochs_steps)
