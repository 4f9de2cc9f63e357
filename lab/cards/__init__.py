"""Make the tables and pictures of the checkpoints' cards."""
