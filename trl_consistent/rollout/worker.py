# SPDX-License-Identifier: Apache-2.0
"""What runs in the workers of a vLLM server: takes weights from the trainer and puts them into the model.

vLLM imports it when a server is started with our `--weight-transfer-config`; nothing else does.
"""

from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from ..upstream.vllm import repack_cpu_experts, vllm_runs_on_cpu
from .transfer import BACKEND, described, receive


@dataclass
class Peer(WeightTransferInitInfo):
    """The trainer, as it introduced itself: where it listens, and the token that it wants to see."""

    host: str
    port: int
    token: str


class SocketWeightTransferEngine(WeightTransferEngine[Peer, WeightTransferUpdateInfo]):
    """Takes weights over a TCP connection, and only from the trainer that introduced itself last.

    Weights are loaded as they come: `register_weight_transfer` keeps a CPU model's layers in their plain layout.
    """

    init_info_cls = Peer
    update_info_cls = WeightTransferUpdateInfo

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if not vllm_runs_on_cpu():
            raise ValueError(
                f"The weight-transfer backend {BACKEND!r} is for vLLM's CPU build. Start a server with GPUs with "
                """`--weight-transfer-config '{"backend": "nccl"}'`."""
            )
        self.peer: Peer | None = None

    def init_transfer_engine(self, init_info: Peer) -> None:
        """Connects once, without weights, so that the trainer learns what is served here and that it can be reached."""
        self.peer = init_info
        self.receive_weights(WeightTransferUpdateInfo())

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """vLLM's ends with a synchronization of an accelerator, and there is none."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: WeightTransferUpdateInfo) -> None:
        if self.peer is None:
            raise RuntimeError("No trainer has introduced itself to this server (init_weight_transfer_engine).")
        receive(asdict(self.peer), self._load, model=described(self.model_config.hf_text_config))

    def _load(self, name: str, tensor: Tensor) -> bool:
        loaded = self.model.load_weights([(name, tensor)])
        return loaded is None or len(loaded) > 0  # some models do not say

    def finish_weight_update(self) -> None:
        repack_cpu_experts(self.model)

    def shutdown(self) -> None:
        self.peer = None
