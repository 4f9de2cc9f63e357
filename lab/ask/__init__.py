"""What asks the TPU compiler, by subject: `lab.record` asks, and writes the answers."""
