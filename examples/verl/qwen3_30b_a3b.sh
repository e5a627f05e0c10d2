#!/usr/bin/env bash
# GRPO of Qwen3-30B-A3B-Base with rollouts in NVFP4, on eight GPUs of 80 GB; see grpo.sh for what to
# run. Tokens go to the same experts in trainer and rollouts.
MODEL=${MODEL:-Qwen/Qwen3-30B-A3B-Base} NAME=qwen3-30b-a3b GPUS=${GPUS:-8}
EXTRA=(+routing_replay@_global_=r3)
source "$(dirname "${BASH_SOURCE[0]}")/grpo.sh"
