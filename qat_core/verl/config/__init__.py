"""Hydra config groups for verl, found through `hydra_plugins/nvfp4_search_path.py`."""
