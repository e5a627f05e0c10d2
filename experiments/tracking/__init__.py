"""MLflow as a view of the runs."""
