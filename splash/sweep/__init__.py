"""Sweeps: many points, each measured where its hardware is present and simulated where it is not.

    python -m splash.sweep sweep=paper +hardware=b200,h200,dcu --multirun

`points` says which points there are, `runner` has them measured or simulated and keeps their rows in a `store`, and
`report` and `table` show the rows.
"""
