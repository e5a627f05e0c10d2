"""Keeps `+nvfp4=w4a16` known to Hydra beside packages that break its namespace of plugins.

Hydra looks for plugins in `hydra_plugins`, a package that many projects share by having no
`__init__.py` there. One that has it hides this project's folder, which is added again here: verl
imports this module at its start (entry point `verl.plugins`).
"""

from pathlib import Path

import hydra_plugins

_OWN = str(Path(__file__).resolve().parents[2] / "hydra_plugins")
if _OWN not in hydra_plugins.__path__:
    hydra_plugins.__path__.append(_OWN)
