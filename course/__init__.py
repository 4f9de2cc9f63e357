"""What people start with ``python -m course.…``: the doctor, drawing, TPU questions, training."""
