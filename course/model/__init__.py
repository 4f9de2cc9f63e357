"""What both models are made of, in plain JAX: functions of dictionaries of parameters."""
