#!/usr/bin/env bash
# GRPO of Qwen3-8B-Base with rollouts in NVFP4, on eight GPUs of 80 GB; see grpo.sh for what to run.
MODEL=${MODEL:-Qwen/Qwen3-8B-Base} NAME=qwen3-8b GPUS=${GPUS:-8} EXTRA=()
source "$(dirname "${BASH_SOURCE[0]}")/grpo.sh"
