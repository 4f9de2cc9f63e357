"""Several processes that run one program: a launcher for one machine, and a worker that draws on many."""
