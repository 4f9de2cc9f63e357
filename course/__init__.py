"""What people start with ``python -m course.…``: the doctor, several processes on one machine, the TPU compiler."""
