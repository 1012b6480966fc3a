"""Break a job on purpose, and prove that it came back exactly."""
