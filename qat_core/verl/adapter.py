"""The trainer's side of verl's weight sync, with sockets in the run's own temporary folder.

verl names them `/tmp/rl-colocate-zmq-<Ray job>-...`, alike for each Ray: of two runs on one machine
one would load the other's weights. Unneeded once verl's names differ between Ray clusters.
"""

import tempfile
from typing import Any

from verl.workers.rollout.vllm_rollout import ServerAdapter


def own_socket(handle: str) -> str:
    """A handle of verl's, moved to the folder that TMPDIR names."""
    return handle.replace("ipc:///tmp/", f"ipc://{tempfile.gettempdir()}/")


class OwnSocketAdapter(ServerAdapter):  # type: ignore[misc]
    """Selected by `qat_core.verl.engine`."""

    zmq_handle: str

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.zmq_handle = own_socket(self.zmq_handle)
