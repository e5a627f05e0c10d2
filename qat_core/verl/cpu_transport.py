"""Weights from trainers to rollouts of other processes, without a GPU.

verl's own transports need one. This one is for one machine: the first trainer sends buckets over
ZeroMQ, cut and put together by verl's own functions, to every rollout worker and waits for each
one's answer. `checkpoint_engine.backend=cpu`; `qat_core.verl.engine` imports it on a CPU.
"""

import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

import torch
import zmq
from torch import Tensor
from verl.checkpoint_engine.base import (
    CheckpointEngine,
    CheckpointEngineRegistry,
    TensorMeta,
    merge_weight_chunks,
    split_weight_chunks,
)


@CheckpointEngineRegistry.register("cpu")
class CpuCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """One side of a sync: a trainer, of which the master sends, or a rollout worker."""

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self._bucket_bytes = bucket_size
        self._is_master = is_master
        self._context: Any = zmq.Context.instance()
        self._peers: list[Any] = []

    def prepare(self) -> str:
        """Address at which a rollout worker listens, below TMPDIR; a trainer's is not used."""
        address = f"ipc://{tempfile.gettempdir()}/weights-{uuid.uuid4().hex}"
        if not self._is_master:
            self._peers = [self._context.socket(zmq.REP)]
            self._peers[0].bind(address)
        return address

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[str]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Every rollout worker's address, for the trainers."""
        addresses = metadata[actor_wg_world_size:]
        return (
            {"addresses": [addresses] * actor_wg_world_size},
            {"addresses": [[]] * rollout_world_size},
        )

    def init_process_group(self, addresses: list[str]) -> None:
        """The trainer that sends connects to all rollout workers."""
        if self._is_master:
            self._peers = [self._context.socket(zmq.REQ) for _ in addresses]
            for socket, address in zip(self._peers, addresses, strict=True):
                socket.connect(address)

    def finalize(self) -> None:
        """Closes all sockets."""
        for socket in self._peers:
            socket.close(linger=0)
        self._peers = []

    @torch.no_grad()
    async def send_weights(
        self, weights: Iterator[tuple[str, Tensor]], global_steps: int | None = None
    ) -> None:
        """All trainers go through the stream, which is gathered on the way; the first sends it."""
        metas: list[TensorMeta] = []
        bucket = bytearray()
        async for meta, chunk in split_weight_chunks(weights, self._bucket_bytes):
            if not self._is_master:
                continue
            if len(bucket) + meta.chunk_size > self._bucket_bytes:
                self._send(metas, bucket, is_last=False)
                metas, bucket = [], bytearray()
            meta.offset = len(bucket)
            metas.append(meta)
            bucket += chunk.cpu().numpy().tobytes()
        if self._is_master:
            self._send(metas, bucket, is_last=True)

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, Tensor]]:
        """Weights by name, as they come."""
        async for name, weight in merge_weight_chunks(self._receive(), self._bucket_bytes):
            yield name, weight

    def _send(self, metas: list[TensorMeta], bucket: bytearray, *, is_last: bool) -> None:
        for socket in self._peers:
            socket.send_pyobj((metas, bucket, is_last))
        for socket in self._peers:
            socket.recv()

    async def _receive(self) -> AsyncIterator[tuple[TensorMeta, Tensor]]:
        (socket,) = self._peers
        is_last = False
        while not is_last:
            metas, data, is_last = socket.recv_pyobj()
            bucket = torch.frombuffer(data, dtype=torch.uint8)
            for meta in metas:
                yield meta, bucket[meta.offset : meta.offset + meta.chunk_size]
            socket.send(b"")
