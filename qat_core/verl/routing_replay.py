"""verl's FSDP2 engine whose actor sends tokens to the experts that the rollouts name.

verl 0.9.1 brings the rollouts' `routed_experts` to every worker, and replays them with Megatron and
VeOmni alone. `+routing_replay=r3` sets the keys; see docs/routing_replay.md.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from qat_core.planning.structure import expert_blocks
from qat_core.routing import NO_ROUTE, decoder_layers, replay
from qat_core.verl.rules import REPLAY_MODE


class ReplayEngine(FSDPEngineWithLMHead):  # type: ignore[misc]
    """FSDP2 engine that replays routes where `router_replay.mode` is R3.

    Old log-probs and every update of a batch come through `forward_backward_batch`, with the same
    `routed_experts`. The replay of a micro-batch lasts until the next one starts, as gradient
    checkpointing computes blocks again in the backward pass.
    """

    def __init__(self, model_config: Any, engine_config: Any, *args: Any, **kwargs: Any) -> None:
        mode = engine_config.router_replay.mode
        if mode == "R2" or (mode == "R3" and engine_config.ulysses_sequence_parallel_size > 1):
            raise ValueError(
                f"{REPLAY_MODE}: {mode}: FSDP2 replays R3 alone, without sequence parallelism"
            )
        super().__init__(model_config, engine_config, *args, **kwargs)
        self._replays = mode == "R3"
        self._replaying = ExitStack()

    def _build_module(self) -> nn.Module:
        module: nn.Module = super()._build_module()
        if self._replays and not expert_blocks(module):
            raise ValueError(f"{REPLAY_MODE}: R3: the model has no experts; remove the key")
        return module

    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable[..., Any], forward_only: bool = False
    ) -> Any:
        """verl's; the last micro-batch's replay ends with it."""
        with self._replaying:
            return super().forward_backward_batch(data, loss_function, forward_only)

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict[str, Any], Any]:
        """verl's; from here on the model's tokens go to the micro-batch's experts.

        Raises:
            ValueError: a token that trains, or that such a token sees, has no route, or the routes
                are not of this model.
        """
        inputs, output_args = super().prepare_model_inputs(micro_batch)
        if self._replays:
            ids = _routes(micro_batch, decoder_layers(self.module))
            lengths = micro_batch["input_ids"].offsets().diff()
            by_layer = _as_the_model_gets_them(ids, lengths, inputs["input_ids"]).unbind(1)
            self._replaying.close()
            self._replaying.enter_context(
                replay(self.module, dict(zip(expert_blocks(self.module), by_layer, strict=True)))
            )
        return inputs, output_args


def _routes(micro_batch: TensorDict, layers: Sequence[int]) -> Tensor:
    """verl's ids of these decoder layers, (tokens, layers, k), `NO_ROUTE` for its rows of zeros."""
    routes: Any = micro_batch.get("routed_experts", None)
    if routes is None:
        raise ValueError("routed_experts: missing: the rollouts returned no routes")
    lengths = micro_batch["input_ids"].offsets().diff()
    if not torch.equal(routes.offsets().diff(), lengths):
        raise ValueError("routed_experts: of other lengths than input_ids")
    num_layers, top_k = routes.shape[2:]
    if num_layers <= max(layers):
        raise ValueError(
            f"routed_experts: of {num_layers} layers, the model has experts in layer {max(layers)}"
        )
    if top_k == 1:
        raise ValueError(
            "routed_experts: with one expert a token, verl's zeros for 'no route' also mean expert "
            "0; remove +routing_replay=r3"
        )
    ids: Tensor = routes.values()[:, layers].long()
    missing = (ids == 0).all(-1)
    _require_routes(missing.any(-1), lengths, micro_batch["loss_mask"])
    return ids.masked_fill(missing[..., None], NO_ROUTE)


def _require_routes(missing: Tensor, lengths: Tensor, loss_mask: Tensor) -> None:
    """Only the last token of a sequence, and sequences that train nothing, may have no route."""
    sequences = torch.split(missing, lengths.tolist())
    for number, (tokens, mask) in enumerate(zip(sequences, loss_mask.unbind(), strict=True)):
        if bool(mask.any()) and bool(tokens[:-1].any()):
            raise ValueError(
                f"routed_experts: sequence {number} has no route for token "
                f"{int(tokens.nonzero()[0])} of {len(tokens)}; conversations of several turns have "
                "none for what the model did not sample"
            )


def _as_the_model_gets_them(ids: Tensor, lengths: Tensor, input_ids: Tensor) -> Tensor:
    """Ids (tokens, layers, k) with rows for padding: a sequence a row, or all of them in one."""
    filled = lengths if len(lengths) == len(input_ids) else lengths.sum()[None]
    seen = torch.arange(input_ids.shape[1], device=ids.device) < filled[:, None]
    assert int(seen.sum()) == len(ids), "sequence parallelism is refused"
    rows = ids.new_full((*seen.shape, *ids.shape[1:]), NO_ROUTE)
    rows[seen] = ids
    return rows.flatten(0, 1)
