"""What a training backend does. The loss, the batch and the fidelity suite are the same for every backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from learner.core.fidelity import RoutingAgreement
from learner.core.packing import MicroBatch
from learner.core.segments import ModelShape


class BackendError(RuntimeError):
    """A model or setting that the backend cannot train: names it and the remedy."""


@dataclass(frozen=True)
class TokenOutputs:
    """Of the trained tokens of a micro-batch, row-major.

    train_logp_N float32 (with gradient when asked for); entropy_N in nats, when asked for; agreement: replayed
    experts against the model's own choice, when the batch carries routing.
    """

    train_logp_N: Tensor
    entropy_N: Tensor | None
    agreement: RoutingAgreement | None


class Backend(Protocol):
    """One policy being trained. Not thread-safe."""

    shape: ModelShape

    def compute_logprobs(self, batch: MicroBatch, *, grad: bool, entropy: bool = False) -> TokenOutputs:
        """Log-probs of the trained tokens, with the batch's routing when it carries one."""

    def compute_reference_logprobs(self, batch: MicroBatch) -> Tensor:
        """Log-probs [N] under the reference policy, free routing. Raises BackendError without one."""

    def compute_canary(self, ids: list[int]) -> list[float]:
        """Log-probs of tokens 1..N-1 of a prompt, free routing."""

    def zero_grad(self) -> None:
        """Forget gradients."""

    def apply_gradients(self, learning_rate: float) -> float:
        """Clip, update, and return the gradient norm before clipping. A norm that is not finite updates nothing."""

    def export_policy(self, directory: Path) -> None:
        """Write config and weights (Hugging Face names, safetensors) of the current policy."""

    def weights(self) -> Mapping[str, Tensor]:
        """The trained weights at full precision, by the backend's own names."""

    def optimizer_state(self) -> Mapping[str, Tensor]:
        """The optimizer's state as flat tensors."""

    def restore(self, weights: Mapping[str, Tensor], optimizer_state: Mapping[str, Tensor]) -> None:
        """Continue from what `weights` and `optimizer_state` returned. Raises BackendError when names do not fit."""
