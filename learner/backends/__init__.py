"""Training backends, chosen by [train] backend. A backend's module is imported only when it is used."""

from __future__ import annotations

from pathlib import Path

from infra.settings import TrainSection
from learner.backends.base import Backend, BackendError

__all__ = ["Backend", "BackendError", "make_backend"]


def make_backend(train: TrainSection, policy: Path, reference: Path | None) -> Backend:
    """The backend of a run, loaded from a policy directory. Raises BackendError on an unknown or missing one."""
    if train.backend == "torch":
        import torch

        from learner.backends.torch_backend import TorchBackend, TorchBackendOptions

        options = TorchBackendOptions(
            beta1=train.beta1,
            beta2=train.beta2,
            weight_decay=train.weight_decay,
            grad_clip=train.grad_clip,
            dtype=train.dtype,
            device="cuda" if torch.cuda.is_available() else "cpu",
        )
        return TorchBackend(policy, options, reference)
    if train.backend == "megatron":
        raise BackendError('train.backend megatron is not part of this version; set train.backend = "torch"')
    raise BackendError(f"train.backend {train.backend!r}: one of torch")
