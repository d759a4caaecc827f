"""What a run of each task is trained on and measured by: a file a task."""
