"""Quality against dense attention: long-context tasks with paired scores, and model-level comparison."""
