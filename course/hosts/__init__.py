"""Several processes that run one program: a launcher for one machine, and a worker for many."""
