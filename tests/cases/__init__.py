"""Public reports of faults in tools that do this job, replayed on ours; each test's docstring names its report."""
