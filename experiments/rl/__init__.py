"""Reinforcement learning on one device: GRPO, tasks and mismatch metrics."""
