"""What makes and measures the course, and is not installed with it."""
