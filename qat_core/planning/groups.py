"""Which weights share a global scale, found from the model's structure.

Serving engines run some sibling projections of one parent module as a single matrix, which has one
global scale. vLLM fuses the sets below: a test compares them with the `packed_modules_mapping` of
its model classes. The table stands here since a trainer may run where vLLM is not installed.
"""

from collections.abc import Collection

FUSED_SIBLINGS = (
    ("q_proj", "k_proj", "v_proj", "g_proj"),  # the last in OLMo-Hybrid's linear attention
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)


def fused_siblings(module_name: str) -> tuple[str, ...]:
    """Names of all modules that an engine would fuse with this one, itself included."""
    leaf = module_name.rpartition(".")[2]
    for siblings in FUSED_SIBLINGS:
        if leaf in siblings:
            return tuple(module_name.removesuffix(leaf) + sibling for sibling in siblings)
    return (module_name,)


def group_name(module_name: str, present: Collection[str]) -> str:
    """Name of a linear's group: its own, or `parent.q_proj+k_proj+v_proj` of those present."""
    members = [name for name in fused_siblings(module_name) if name in present]
    if len(members) < 2:
        return module_name
    return "+".join([members[0], *(name.rpartition(".")[2] for name in members[1:])])
