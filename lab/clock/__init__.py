"""Measure how long something takes on this machine: `lab.record` asks for it."""
