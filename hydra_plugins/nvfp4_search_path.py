"""Lets Hydra find `+nvfp4=w4a16` in every verl command, without `hydra.searchpath`.

Hydra imports the modules of `hydra_plugins` at each start. A search path given on the command line
would replace the one that verl's one-step-off and asynchronous configurations need for themselves.
"""

import sys

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class NvFp4SearchPath(SearchPathPlugin):  # type: ignore[misc]
    """Appends `qat_core/verl/config`."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Called by Hydra; groups of the same name in verl would be found first."""
        search_path.append(provider="qat_core", path="pkg://qat_core.verl.config")
        if "verl" in sys.modules:
            from qat_core.verl.near_misses import watch

            watch()
