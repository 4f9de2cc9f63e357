"""What people start with ``python -m course.…``: the doctor, hosts, the TPU compiler, training."""
