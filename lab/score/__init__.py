"""Have the judge count what a checkpoint draws right: `lab.record` asks for it."""
