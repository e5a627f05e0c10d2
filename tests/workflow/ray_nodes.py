"""`python -m tests.workflow.ray_nodes MODULE ARGUMENT...`: a program on two nodes of Ray.

Both are of this machine, with a worker slot each, and end with the program.
"""

import os
import runpy
import sys

from ray.cluster_utils import Cluster

CPU_SLOTS = 16  # not cores


def main() -> None:
    """Starts the nodes, and runs the module in this process."""
    node = {"num_cpus": CPU_SLOTS, "num_gpus": 1}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    cluster.add_node(**node)
    os.environ["RAY_ADDRESS"] = cluster.address
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
