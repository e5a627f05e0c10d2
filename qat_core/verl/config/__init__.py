"""Hydra config groups for verl: `hydra.searchpath=[pkg://qat_core.plugins.verl_config]`."""
