"""What a prepared model knows of its quantized weights; `WeightState` owns all of it.

A weight asks `WeightState.rounded`, which looks whether its global scale is of the weights as they
are (`held_weights`: which tensors the model holds, and what wrote them; `uncounted_writes`: writes
that PyTorch counts nowhere), measures all weights again if not, and rounds, or reads what is kept
(`rounded_weights`; under FSDP2 `packed_shards`). Nothing here knows the tensor subclass.
"""
