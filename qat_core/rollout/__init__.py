"""Rollout engines and what travels to them."""
