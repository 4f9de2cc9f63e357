"""What people start with ``python -m course.…``: the doctor, drawing, the TPU compiler, training."""
