"""`headrace doctor`: whether a job can work here, before it waits in a queue.

    headrace doctor ─┬─ checks on this machine      machine.py, inputs.py, disk.py, slurm.py
                     └─ a world of ranks            world.py: by mpirun here, or by srun in a job
                          python -m headrace.launcher.doctor     __main__.py, on every rank
                            stages ── what each rank found ──▶ rank 0 ──▶ every rank      talk.py
                            all judge alike (hosts.py, network.py, shared.py); rank 0 writes the report

A check is a function that returns a `Finding`. What it raises becomes a FAIL with its message, and no wait is without
a limit.
"""
