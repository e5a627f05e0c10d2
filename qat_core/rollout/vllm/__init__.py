"""vLLM as a rollout engine, and the plugin that it loads."""
